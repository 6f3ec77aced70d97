"""Which attributes do programs expect on a parameter that ZeRO shards?

``ds_id`` says that it is one; ``ds_numel`` and ``ds_shape`` are its full sizes. They are plain values
on the parameter. ``ds_status``, ``ds_tensor`` and the methods depend on the moment, and are answered by
the class that a parameter has while its bytes are elsewhere; while it is whole, its own ``ds_status``
is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError
from zeroshard.integrations.deepspeed import names
from zeroshard.integrations.deepspeed.words import ZeroParamStatus
from zeroshard.zero import guard
from zeroshard.zero.init import SpreadParameter
from zeroshard.zero.unit import Unit, UnitState

_ids = itertools.count()


def is_zero_param(parameter: Any) -> bool:
    """Is this a parameter that ZeRO shards?"""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def mark_parameters(params: Iterable[nn.Parameter]) -> None:
    """Put the attributes on parameters that have an owner; others are left alone."""
    _answer_while_away()
    for param in params:
        if guard.owner_of(param) is None:
            continue
        own = param.__dict__
        own.setdefault("ds_id", next(_ids))
        own |= {"ds_numel": param.numel(), "ds_shape": param.shape, "ds_persist": False}
        own |= {
            "ds_status": ZeroParamStatus.AVAILABLE,
            "partition_numel": _Constant(_own_numel(param)),
        }
        guard.list_on_request([param])


class _Constant:
    """A function without arguments; unlike a closure it can be pickled with the parameter."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __call__(self) -> int:
        return self.value


def _answer_while_away() -> None:
    cls: Any = guard.ShardedParameter
    if hasattr(cls, "ds_status"):
        return
    cls.ds_status = property(_status)
    cls.ds_tensor = property(_shard)
    cls.ds_process_group = property(lambda param: None)
    cls.ds_summary = _summary
    cls.all_gather = cls.partition = _refuse


def _status(param: nn.Parameter) -> ZeroParamStatus:
    owner = guard.owner_of(param)
    if isinstance(owner, Unit) and owner.state is UnitState.GATHERING:
        return ZeroParamStatus.INFLIGHT
    return ZeroParamStatus.NOT_AVAILABLE


def _shard(param: nn.Parameter) -> Tensor:
    """The part of the parameter that rests on this rank, flat; empty where its unit was cut elsewhere."""
    owner = guard.owner_of(param)
    shard_S = owner.shard_S if isinstance(owner, (Unit, SpreadParameter)) else None
    if shard_S is None:
        return torch.empty(0, dtype=param.dtype, device=param.device)
    low, high = _own_range(param)
    return shard_S[low:high]


def _own_numel(param: nn.Parameter) -> int:
    low, high = _own_range(param)
    return high - low


def _own_range(param: nn.Parameter) -> tuple[int, int]:
    """Where the parameter lies in this rank's shard."""
    owner = guard.owner_of(param)
    if isinstance(owner, Unit):
        layout, rank, slot = owner.layout, owner.comm.rank, owner.layout.slots[owner.index(param)]
    elif isinstance(owner, SpreadParameter):
        layout, rank, slot = owner.layout, owner.context.comm.rank, owner.layout.slots[0]
    else:
        return 0, 0
    begin, end = layout.shard_range(rank)
    low, high = max(begin, slot.start), min(end, slot.stop)
    return (low - begin, high - begin) if low < high else (0, 0)


def _summary(param: Any, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
    """What DeepSpeed prints about a parameter, under its keys."""
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.ds_numel,
        "ds_numel": param.ds_numel,
        "shape": tuple(param.ds_shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "persist": param.ds_persist,
    }


def _refuse(param: nn.Parameter, *_: Any, **__: Any) -> None:
    row = names.find_member("parameter", "all_gather")
    assert row is not None
    raise UsageError(names.reason_of(row))
