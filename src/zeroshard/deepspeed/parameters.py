"""The attributes that programs expect on a parameter that ZeRO shards.

``ds_id`` marks such a parameter. ``ds_numel`` and ``ds_shape`` are its full sizes. They are plain values
on the parameter. ``ds_status`` and ``ds_tensor`` depend on the parameter's current state: while it is
sharded, properties of its class :class:`~zeroshard.zero.sharded_parameter.ShardedParameter` return them.
While it is whole, the plain ``ds_status`` on the parameter is visible.

``all_gather`` and ``partition`` are the two ends of a :class:`GatheredParameters` block. The methods
refer to their parameter by ``ds_id``, because they are pickled with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from zeroshard.deepspeed.symbols import ZeroParamStatus
from zeroshard.errors import UsageError
from zeroshard.zero import sharded_parameter
from zeroshard.zero.gathered import GatheredParameters
from zeroshard.zero.param_bucket import BucketedParameter, ParamBucket
from zeroshard.zero.unit import Unit, UnitState

_ids = itertools.count()
_by_id: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
_OPENED = "_ds_opened"
"""Attribute between ``all_gather`` and ``partition``: whether ``all_gather`` made the unit whole."""


def is_zero_param(parameter: Any) -> bool:
    """Whether ZeRO shards this parameter."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def mark_parameters(params: Iterable[nn.Parameter]) -> None:
    """Set the attributes on parameters that have an owner. Others are left alone."""
    _answer_while_away()
    for param in params:
        if sharded_parameter.owner_of(param) is None:
            continue
        own = param.__dict__
        ds_id = own.setdefault("ds_id", next(_ids))
        _by_id[ds_id] = param
        own |= {
            "ds_numel": param.numel(),
            "ds_shape": param.shape,
            "ds_persist": False,
            "ds_status": ZeroParamStatus.AVAILABLE,
            "partition_numel": partial(_own_numel, ds_id),
            "all_gather": partial(_all_gather, ds_id),
            "partition": partial(_partition, ds_id),
            "ds_summary": partial(_summary, ds_id),
            "ds_process_group": None,
            "ds_active_sub_modules": set(),
        }
        sharded_parameter.list_on_request([param])


def _own_numel(ds_id: int) -> int:
    """``param.partition_numel()``: the number of its elements on this rank."""
    low, high = _own_range(_find(ds_id))
    return high - low


def _all_gather(
    ds_id: int,
    param_list: Sequence[nn.Parameter] | None = None,
    async_op: bool = False,
    hierarchy: int = 0,
) -> _Arrived | None:
    """``param.all_gather(...)``: make parameters whole until their :func:`partition <_partition>`.

    Collective. Other code that runs in between does not change that. Parameters that are whole stay so.
    ``async_op``: return an object with ``wait()``; the values are complete in any case.
    """
    for param in _named_or(ds_id, param_list):
        if _OPENED in param.__dict__ or sharded_parameter.owner_of(param) is None:
            continue
        owner = sharded_parameter.owner_of(param)
        opens = not isinstance(owner, Unit) or owner.is_sharded
        GatheredParameters([param]).__enter__()
        param.__dict__[_OPENED] = opens or any(
            sibling.__dict__.get(_OPENED) for sibling in _siblings(param)
        )
    return _Arrived() if async_op else None


def _partition(
    ds_id: int,
    param_list: Sequence[nn.Parameter] | None = None,
    hierarchy: int = 0,
    has_been_updated: bool = False,
    free_data: bool = True,
) -> None:
    """``param.partition(...)``: end ``all_gather``. A parameter that it did not gather is left as it is.

    ``has_been_updated``: values that rank 0 wrote are sent to all ranks. Without it an edit raises
    :class:`ShardedAccess`. Collective.

    Raises:
        UsageError: ``free_data`` is False.
    """
    if not free_data:
        raise UsageError(
            "param.partition(free_data=False): a parameter that is not gathered has no memory for "
            "all its values. Leave the argument out, and copy the values before."
        )
    for param in _named_or(ds_id, param_list):
        opened = param.__dict__.pop(_OPENED, None)
        owner = sharded_parameter.owner_of(param)
        if opened is None or owner is None or (isinstance(owner, Unit) and not owner.pin_count):
            continue  # not gathered by ``all_gather``, or an engine has adopted or released it since
        context = GatheredParameters([param], 0 if has_been_updated else None)
        try:
            context.__exit__(None, None, None)
        finally:
            for unit in context.units if opened else ():
                if not unit.pin_count:
                    unit.discard_unsharded(for_keeping=True)  # the shards have edits


def _summary(ds_id: int, slice_shape: Any = None, use_debug_name: bool = False) -> dict[str, Any]:
    """``param.ds_summary()``: what DeepSpeed prints about a parameter, under the same keys."""
    param: Any = _find(ds_id)
    return {
        "id": param.ds_id,
        "status": param.ds_status.name,
        "numel": param.numel(),
        "ds_numel": param.ds_numel,
        "shape": tuple(param.shape),
        "ds_shape": tuple(param.ds_shape),
        "requires_grad": param.requires_grad,
        "grad_shape": None if param.grad is None else tuple(param.grad.shape),
        "persist": param.ds_persist,
        "active_sub_modules": param.ds_active_sub_modules,
        "ds_tensor.shape": (param.partition_numel(),),
    }


class _Arrived:
    """What ``all_gather(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing: the values are complete."""


def _named_or(ds_id: int, param_list: Iterable[nn.Parameter] | None) -> list[nn.Parameter]:
    return [_find(ds_id)] if param_list is None else sharded_parameter.in_order(param_list)


def _find(ds_id: int) -> nn.Parameter:
    param = _by_id.get(ds_id)
    if param is None:
        raise UsageError(
            f"the parameter with ds_id {ds_id} does not exist any more. This is a copy of it, "
            "which has all values and belongs to no engine. Call the method of a parameter of the "
            "engine's model."
        )
    return param


def _siblings(param: nn.Parameter) -> Sequence[nn.Parameter]:
    """The parameters that are unsharded and resharded together with this one."""
    owner = sharded_parameter.owner_of(param)
    return owner.params if isinstance(owner, Unit) else ()


def _answer_while_away() -> None:
    cls: Any = sharded_parameter.ShardedParameter
    if hasattr(cls, "ds_status"):
        return
    cls.ds_status = property(_status)
    cls.ds_tensor = property(_shard)


def _status(param: nn.Parameter) -> ZeroParamStatus:
    owner = sharded_parameter.owner_of(param)
    in_flight = (UnitState.GATHERING, UnitState.UPDATING)
    if isinstance(owner, Unit) and owner.state in in_flight and not owner.is_sharded:
        return ZeroParamStatus.INFLIGHT
    return ZeroParamStatus.NOT_AVAILABLE


def _shard(param: nn.Parameter) -> Tensor:
    """This rank's part of the parameter, flat ``[n]``; empty if this rank owns none of it."""
    owner = sharded_parameter.owner_of(param)
    holder = owner.bucket if isinstance(owner, BucketedParameter) else owner
    shard_S = holder.shard_S if isinstance(holder, (Unit, ParamBucket)) else None
    if shard_S is None:
        return torch.empty(0, dtype=param.dtype, device=param.device)
    low, high = _own_range(param)
    return shard_S[low:high]


def _own_range(param: nn.Parameter) -> tuple[int, int]:
    """The range of the parameter in this rank's shard."""
    owner = sharded_parameter.owner_of(param)
    if isinstance(owner, Unit):
        layout, rank, slot = owner.layout, owner.comm.rank, owner.layout.slots[owner.index(param)]
    elif isinstance(owner, BucketedParameter):
        return owner.own_part()
    else:
        return 0, 0
    begin, end = layout.shard_range(rank)
    low, high = max(begin, slot.start), min(end, slot.stop)
    return (low - begin, high - begin) if low < high else (0, 0)
