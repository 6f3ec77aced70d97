"""Messages between neighbour stages, for programs (``deepspeed.runtime.pipe.p2p``).

Both calls wait. The instructions of the engine have messages of their own, so the two do not mix.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from zeroshard.deepspeed import collectives as comm
from zeroshard.errors import UsageError

_grids: list[weakref.ref[Any]] = []  # the last one is in use; engines keep them alive


def init_process_groups(grid: Any) -> None:
    """Use the topology of ``grid``. The engine of a ``PipelineModule`` does this."""
    _grids[:] = [weakref.ref(grid)]


def _rank_of(stage: int, call: str) -> int:
    grid = _grids[-1]() if _grids else None
    if grid is None:
        raise UsageError(
            f"p2p.{call}() before there is a pipeline: build the engine of a PipelineModule first, or "
            "call p2p.init_process_groups(grid)."
        )
    rank: int = grid.stage_to_global(stage)
    return rank


def send(tensor: Tensor, dest_stage: int, async_op: bool = False) -> Any:
    """Send a tensor to a stage of this pipeline. ``async_op``: return a handle instead of waiting."""
    target = _rank_of(dest_stage, "send")
    return (comm.isend if async_op else comm.send)(tensor.contiguous(), dst=target)


def recv(tensor: Tensor, src_stage: int, async_op: bool = False) -> Any:
    """Receive into a tensor from a stage of this pipeline. ``async_op``: as in :func:`send`."""
    source = _rank_of(src_stage, "recv")
    return (comm.irecv if async_op else comm.recv)(tensor, src=source)


def can_send_recv() -> bool:
    """True: sends and receives work everywhere."""
    return True
