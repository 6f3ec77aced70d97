"""Gathers and reductions over a gloo group, with gloo's all-to-all and broadcasts.

Gloo's own reduce-scatter all-reduces a clone of the whole input, in the dtype of the buffer. Its own
all-gather copies through a private buffer. Here a reduction is an all-to-all and a sum in rank order that
is rounded once; the all-to-all moves half as many bytes as the all-reduce. A gather is one broadcast per
rank, received in place. Measured with two ranks and 6 MB of bf16: a reduction takes 2.4 ms of CPU time
instead of 8.4 ms, a gather 2.2 ms instead of 3.1 ms.

W ranks; N padded elements, S = N // W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import DONE, Handle, ProcessGroupComm
from zeroshard.comm.scratch import KeepsScratch, Scratch
from zeroshard.comm.sums import sum_in_rank_order


class GlooComm(KeepsScratch, ProcessGroupComm):
    """Collectives of a gloo group. Sums have the bits of :class:`zeroshard.comm.p2p.P2PComm`."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        super().__init__(group, **options)
        self._scratch = Scratch()

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Every rank broadcasts its slice of ``full_N``; the others receive it in place."""
        item = self.recorder.all_gather(name, full_N, shard_S)
        if not full_N.numel():
            return DONE
        bound = self.bound(item)
        slices = full_N.view(self.size, -1).unbind()
        own = slices[self.rank]
        if own.data_ptr() != shard_S.data_ptr():
            own.copy_(shard_S)
        return _All(
            [
                self._start(item, bound.broadcast, piece.view(torch.uint8), source)
                for piece, source in zip(slices, self.ranks, strict=True)
            ]
        )

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Every rank receives all ranks' chunks of its slice; ``wait`` adds them."""
        numel = full_N.numel()
        item = self.recorder.reduce_scatter(name, out_S, full_N)
        if not numel:
            return DONE
        space = self._scratch.take(full_N.dtype, numel, full_N.device)
        chunks = space[:numel]
        arrival = self._start(
            item, self.bound(item).all_to_all, chunks.view(torch.uint8), full_N.view(torch.uint8)
        )
        parts = chunks.view(self.size, -1).unbind()
        return _Sum(arrival, parts, out_S, space, self._scratch)

    def close(self) -> None:
        """Destroy the group if this object made it, and free the scratch memory."""
        super().close()
        self._scratch = Scratch()


class _All:
    """Waits for several handles."""

    __slots__ = ("_handles",)

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()


class _Sum:
    """Chunks in flight; ``wait`` adds them."""

    __slots__ = ("_arrival", "_out_S", "_parts", "_scratch", "_space")

    def __init__(
        self,
        arrival: Handle,
        parts: Sequence[Tensor],
        out_S: Tensor,
        space: Tensor,
        scratch: Scratch,
    ) -> None:
        self._arrival: Handle | None = arrival
        self._parts = parts
        self._out_S = out_S
        self._space = space
        self._scratch = scratch

    def wait(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is None:
            return
        arrival.wait()
        sum_in_rank_order(self._parts, self._out_S)
        self._scratch.give(self._space)
        del self._parts, self._out_S, self._space
