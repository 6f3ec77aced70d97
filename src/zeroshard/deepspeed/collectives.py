"""Collectives of ``torch.distributed`` that programs call through ``deepspeed.comm``.

Names are torch's. Keyword arguments for DeepSpeed's logger are dropped. The engine does not use this
module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from zeroshard.comm.env import current_rank_info, local_device

P2POp, ProcessGroup, ReduceOp = dist.P2POp, dist.ProcessGroup, dist.ReduceOp

_LOGGING = ("prof", "log_name", "debug")

_UNCHANGED = (
    *("broadcast", "broadcast_object_list", "all_reduce", "all_gather", "all_gather_object"),
    *("reduce", "reduce_scatter", "all_to_all", "all_to_all_single", "gather", "scatter"),
    *("send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "monitored_barrier"),
    *("new_group", "destroy_process_group", "is_available", "is_initialized"),
)


def _without_logging(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **{k: v for k, v in kwargs.items() if k not in _LOGGING})

    return wrapped


def __getattr__(name: str) -> Any:
    if name not in _UNCHANGED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = _without_logging(getattr(dist, name))
    return made


def backend_name() -> str:
    """The backend of the default group: ``gloo`` or ``nccl``."""
    return str(dist.get_backend())


def get_rank(group: Any = None) -> int:
    """This rank's number in the group; without a default group, its rank in the environment."""
    return dist.get_rank(group) if dist.is_initialized() else current_rank_info().rank


def get_world_size(group: Any = None) -> int:
    """Number of ranks of the group; without a default group, the world size in the environment."""
    return dist.get_world_size(group) if dist.is_initialized() else current_rank_info().world_size


def get_local_rank() -> int:
    """This rank's number on its host."""
    return current_rank_info().local_rank


def get_world_group() -> Any:
    """The group of all ranks; None before it is created."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """The global rank of a group's rank."""
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The global ranks of a group's members."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> Any:
    """A ``DeviceMesh`` over all ranks."""
    kind = "cpu" if backend_name() == "gloo" else local_device().type
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def all_gather_into_tensor(
    output_tensor: Tensor, tensor: Tensor, group: Any = None, async_op: bool = False, **_: Any
) -> Any:
    """Write every rank's ``tensor`` into ``output_tensor``, in rank order."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(output_tensor, tensor, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **_: Any,
) -> Any:
    """Write this rank's part of the reduced ``tensor`` into ``output_tensor``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(output_tensor, tensor, op=op, group=group, async_op=async_op)


allgather_fn, reduce_scatter_fn = all_gather_into_tensor, reduce_scatter_tensor


def inference_all_reduce(tensor: Tensor, op: Any = ReduceOp.SUM, group: Any = None) -> Any:
    """``all_reduce``."""
    return dist.all_reduce(tensor, op=op, group=group)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
    **_: Any,
) -> Any:
    """``all_reduce`` of several tensors, in flight together."""
    return _together(
        [dist.all_reduce(t, op=op, group=group, async_op=True) for t in tensors], async_op
    )


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Any = None,
    async_op: bool = False,
    **_: Any,
) -> Any:
    """``all_gather_into_tensor`` of several pairs, in flight together."""
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [all_gather_into_tensor(out, own, group, async_op=True) for out, own in pairs]
    return _together(works, async_op)


class _Works:
    """Several collectives in flight; one ``wait`` waits for all of them."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            if timeout is None:
                work.wait()
            else:
                work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _together(works: Sequence[Any], async_op: bool) -> Any:
    found = _Works(works)
    if async_op:
        return found
    found.wait()
    return None


def has_all_gather_into_tensor() -> bool:
    """True: torch has it."""
    return True


has_reduce_scatter_tensor = has_coalescing_manager = has_all_reduce_coalesced = (
    has_all_gather_into_tensor
)
