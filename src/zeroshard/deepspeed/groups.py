"""Process groups under DeepSpeed's names.

All ranks are data-parallel. There is no tensor, sequence or expert parallelism yet: those groups have one
member and no process group.
"""

from __future__ import annotations

from typing import Any

from zeroshard.deepspeed.collectives import get_rank, get_world_group, get_world_size

mpu = None


def _all(*_: Any, **__: Any) -> Any:
    """The process group of all ranks."""
    return get_world_group()


def _count(*_: Any, **__: Any) -> int:
    """Number of ranks in the group of all ranks."""
    return get_world_size()


def _place(*_: Any, **__: Any) -> int:
    """This rank's number in the group of all ranks."""
    return get_rank()


def _nobody(*_: Any, **__: Any) -> None:
    """None: this rank would be the only member of the group."""


def _one(*_: Any, **__: Any) -> int:
    return 1


def _zero(*_: Any, **__: Any) -> int:
    return 0


_get_data_parallel_group = _get_sequence_data_parallel_group = get_data_parallel_group = _all
_get_expert_data_parallel_group = _all
_get_data_parallel_world_size = _get_sequence_data_parallel_world_size = _count
_get_expert_data_parallel_world_size = get_data_parallel_world_size = _count
_get_data_parallel_rank = _get_sequence_data_parallel_rank = _place
_get_expert_data_parallel_rank = get_data_parallel_rank = _place

_get_sequence_parallel_group = _get_model_parallel_group = _get_tensor_model_parallel_group = (
    _nobody
)
_get_expert_parallel_group = get_model_parallel_group = get_tensor_model_parallel_group = _nobody
_get_sequence_parallel_world_size = _get_model_parallel_world_size = _one
_get_tensor_model_parallel_world_size = _get_expert_parallel_world_size = _one
get_model_parallel_world_size = get_tensor_model_parallel_world_size = _one
_get_sequence_parallel_rank = _get_model_parallel_rank = _get_tensor_model_parallel_rank = _zero
_get_expert_parallel_rank = get_model_parallel_rank = get_tensor_model_parallel_rank = _zero
_get_broadcast_src_rank = _zero
