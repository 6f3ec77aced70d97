"""Reduces gradients from autograd into the shards that the optimizer reads.

Every trainable unit has a :class:`~zeroshard.zero.gradients.GradBuffer`. Buffers are reduced in one fixed
order that does not depend on what a rank ran; gradients that did not arrive count as zeros (ADR 0004).
Otherwise ranks would start collectives in different orders and wait for each other without end.

Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.errors import UnsupportedError
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.unit import Unit

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Handle

MAX_IN_FLIGHT = 2
"""Reductions in flight during backward. More would cost memory and gain no overlap."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    buffer: GradBuffer
    handles: list[Handle]
    target_S: Tensor
    source: Tensor  # keeps the memory until the reduction has ended


class GradReducer:
    """Reduces buffers during backward, in reverse order, with at most :data:`MAX_IN_FLIGHT` in flight.

    ``eager``: reduce after every backward (stages 2 and 3). Otherwise the local sum is reduced once, at
    the accumulation boundary. ``bucket_numel``: at most this many elements per reduce-scatter
    (``reduce_bucket_size``), rounded up to a multiple of 64 per rank. ``predivide``: local gradients are
    divided by this before the reduction (``prescale_gradients``, ``gradient_predivide_factor``).
    ``whole``: every rank needs the whole reduced gradient (stage 0). ``overlap``: reductions run while
    backward goes on; otherwise each is waited for. ``expects_accumulation()``: whether a step sums
    several micro-batches.
    """

    def __init__(
        self,
        buffers: Sequence[GradBuffer],
        *,
        eager: bool,
        whole: bool,
        expects_accumulation: Callable[[], bool],
        bucket_numel: int,
        overlap: bool,
        predivide: float = 1.0,
    ) -> None:
        self.buffers = list(buffers)
        self.order = list(reversed(self.buffers))  # backward reaches the last unit first
        self.eager = eager
        self.whole = whole
        self.expects_accumulation = expects_accumulation
        self.bucket_numel = bucket_numel
        self.in_flight_limit = MAX_IN_FLIGHT if overlap else 0
        self.predivide = predivide
        self.reducing = False
        self.waiting = False  # gradients of an ended backward are not reduced yet
        self._completes = False  # the running backward is the last one of its step
        self._next = 0
        self._in_flight: deque[_InFlight] = deque()

    # ------------------------------------------------------------------ one backward

    def begin_backward(self, *, boundary: bool) -> None:
        """To be called once per backward, before its first gradient."""
        self.reducing = self.eager or boundary
        self._completes = boundary
        self._next = 0
        for buffer in self.buffers:
            buffer.num_ready, buffer.complete = 0, False

    def accumulate_grad(self, buffer: GradBuffer, index: int, param: nn.Parameter) -> None:
        """Take the gradient that autograd accumulated into ``param.grad``.

        Raises:
            UnsupportedError: it is sparse.
        """
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.is_sparse:
            raise UnsupportedError(
                f"parameter {buffer.unit.layout.slots[index].fqn!r} has a sparse gradient; ZeRO "
                "reduces dense flat gradients. Use sparse=False in the embedding."
            )
        buffer.accumulate_grad(index, grad, self._grad_dtype(buffer.unit))
        buffer.num_ready += 1
        if buffer.num_ready == len(buffer.unit.params):
            self.finish_buffer(buffer)

    def finish_buffer(self, buffer: GradBuffer) -> None:
        """Note that backward gives no more gradients of the unit, and reduce buffers whose turn it is."""
        buffer.complete = True
        while self.reducing and self._next < len(self.order) and self.order[self._next].complete:
            self._launch_next()

    def _grad_dtype(self, unit: Unit) -> torch.dtype:
        many = not self.eager and self.expects_accumulation()
        return unit.row.grad_accum if many else unit.row.reduce

    def end_backward(self) -> None:
        """Reduce the remaining buffers in the fixed order, the same on every rank."""
        self.waiting = not self.reducing
        if self.waiting:
            return
        while self._next < len(self.order):
            self._launch_next()
        for buffer in self.order:  # gradients that arrived after their buffer's reduction
            if buffer.grads_N is not None:
                self._launch(buffer)
        self._drain(0)

    def _launch_next(self) -> None:
        buffer = self.order[self._next]
        self._next += 1
        self._launch(buffer)

    # ------------------------------------------------------------------ one reduction

    def _launch(self, buffer: GradBuffer) -> None:
        unit, layout = buffer.unit, buffer.unit.layout
        buffer.prefetch()  # a stored sum is read back during the reduction, which adds to it
        grads_N = buffer.detach_local()
        if self.predivide != 1.0:
            grads_N.div_(self.predivide)
        if grads_N.dtype != unit.row.reduce:
            with buffer.ledger.lend("cast", layout.full_numel * unit.row.reduce.itemsize):
                grads_N = grads_N.to(unit.row.reduce)
        begin, end = layout.shard_range(buffer.comm.rank)
        # A slice of grads_N where that is kept (stages 0 and 1), else a tensor of its own.
        apart = buffer.transient and buffer.comm.world_size > 1
        target_S = torch.empty_like(grads_N[begin:end]) if apart else grads_N[begin:end]
        handles = self._reduce_scatter(buffer, target_S, grads_N)
        self._in_flight.append(_InFlight(buffer, handles, target_S, grads_N))
        buffer.reducing_N, buffer.reduce_result_S = grads_N, target_S
        buffer.report()
        self._drain(self.in_flight_limit)

    def _reduce_scatter(
        self, buffer: GradBuffer, target_S: Tensor, grads_N: Tensor
    ) -> list[Handle]:
        comm, name = buffer.comm, buffer.unit.name
        world_size, shard_numel = comm.world_size, target_S.numel()
        columns = max(64, -(-self.bucket_numel // world_size // 64) * 64)
        if columns >= shard_numel:
            return [comm.reduce_scatter(target_S, grads_N, name=name)]
        handles: list[Handle] = []
        grads_WS = grads_N.view(world_size, shard_numel)
        for at in range(0, shard_numel, columns):
            bucket = grads_WS[:, at : at + columns].contiguous().view(-1)
            with buffer.ledger.lend("bucket", bucket.nbytes):
                handle = comm.reduce_scatter(target_S[at : at + columns], bucket, name=name)
                handle.wait()  # small buckets bound memory, so one at a time
        return handles

    def _drain(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            done = self._in_flight.popleft()
            for handle in done.handles:
                handle.wait()
            buffer = done.buffer
            first = not buffer.is_reduced
            if first and self.eager and self.expects_accumulation():
                buffer.reduced_S = done.target_S.to(buffer.unit.row.grad_accum)
            else:
                buffer.add_reduced(done.target_S)
            if self.whole:
                buffer.reduced_N = done.source if first else None
            buffer.reducing_N = buffer.reduce_result_S = None
            buffer.store_reduced(complete=self._completes)
            buffer.report()

    # ------------------------------------------------------------------ the step

    def finish(self) -> None:
        """Reduce everything that arrived. At stage 0, give every rank the whole gradient."""
        if any(buffer.grads_N is not None for buffer in self.buffers) or any(
            not buffer.is_reduced for buffer in self.buffers
        ):
            self.reducing, self.waiting, self._next = True, False, len(self.order)
            self._completes = True
            for buffer in self.order:
                if buffer.grads_N is not None or not buffer.is_reduced:
                    self._launch(buffer)
            self._drain(0)
        if self.whole:
            self._spread()

    def _spread(self) -> None:
        handles = []
        for buffer in self.buffers:
            assert buffer.reduced_S is not None
            full_N = buffer.reduced_N
            if full_N is None or full_N.dtype != buffer.reduced_S.dtype:
                full_N = torch.empty(
                    buffer.unit.layout.full_numel,
                    dtype=buffer.reduced_S.dtype,
                    device=buffer.reduced_S.device,
                )
            buffer.reduced_N = full_N
            handles.append(buffer.comm.all_gather(full_N, buffer.reduced_S, name=buffer.unit.name))
        for buffer, handle in zip(self.buffers, handles, strict=True):
            handle.wait()
            buffer.report()

    def summed(self, buffer: GradBuffer) -> Tensor | None:
        """The reduced gradient ``[S]`` of all backwards since the last step; None before the first one.

        Collective. Local gradients that are not reduced yet are reduced in a copy, so the buffer does not
        change.

        Raises:
            UsageError: gradients are offloaded.
        """
        buffer.check_not_offloaded()
        if not self.waiting:
            return buffer.peek()
        layout, row = buffer.unit.layout, buffer.unit.row
        grads_N = torch.zeros(
            layout.full_numel, dtype=row.grad_accum, device=buffer.unit.full_N.device
        )
        for slot, view, filled in zip(layout.slots, buffer.views, buffer.filled, strict=False):
            if filled:
                grads_N[slot.start : slot.stop].view(slot.shape).copy_(view)
        grads_N = grads_N.div_(self.predivide).to(row.reduce)
        sum_S = torch.empty(layout.shard_numel, dtype=row.reduce, device=grads_N.device)
        for handle in self._reduce_scatter(buffer, sum_S, grads_N):
            handle.wait()
        before_S = buffer.peek()
        return sum_S if before_S is None else before_S + sum_S

    def abandon(self) -> None:
        """Drop the gradients of a backward that an exception ended.

        Waits for reductions in flight.
        """
        while self._in_flight:
            for handle in self._in_flight.popleft().handles:
                handle.wait()
        self.reset()

    def close(self, *, wait: bool = True) -> None:
        """Free all gradients. ``wait=False``: drop reductions in flight, which will never finish."""
        try:
            if wait:
                self.abandon()
        finally:
            self._in_flight.clear()
            self.abandon()

    def reset(self) -> None:
        """Free the gradients after the update."""
        for buffer in self.buffers:
            buffer.reset()
        self.reducing = self.waiting = False
