"""Sums of gradients that pass between nodes once per step (``hierarchy.outer_reduce: "boundary"``).

[Note: node sums] A reduction of two hops adds gradients inside a node, or inside a replica, and then
between them. If a step has several micro-batches, only the first hop is done for each. Its results are
added up in ``node_sum_P`` of the buffer, P = N / I elements for I ranks of a node: what the ranks at one
place of all nodes need. With the last micro-batch the sum takes the second hop and becomes part of the
reduced gradient, so ``reduced_S`` has only what is summed over all ranks, as without this. MiCS
(https://arxiv.org/abs/2205.00119) calls it 2-hop gradient synchronization.

*What travels.* Micro-batches are added in the dtype of the accumulation. The sum is rounded to the dtype
of reductions before its second hop, as the local sum of stage 1 is before both.

*Which gradients.* Those of a step with one micro-batch, or that arrive when the buffer has a reduced
gradient already, take both hops at once. All ranks decide alike: they know the same micro-batches.

Letters: as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from zeroshard.comm.hops import TwoHops
from zeroshard.memory.storage import real_view

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Handle
    from zeroshard.zero.gradients import GradBuffer


class _Sum(NamedTuple):
    """A sum in flight, inside a node or between nodes."""

    buffer: GradBuffer
    operand: Tensor  # its memory must live until the sum has ended
    result: Tensor
    handle: Handle
    completes: bool


class NodeSums:
    """The sums inside nodes of the buffers that are reduced in two hops. See [Note: node sums].

    ``in_flight_limit``: the largest number of sums in flight on each hop while backward goes on.
    """

    def __init__(self, buffers: Sequence[GradBuffer], in_flight_limit: int) -> None:
        self._comms = {b: b.comm for b in buffers if isinstance(b.comm, TwoHops)}
        self._limit = in_flight_limit
        self._inside: deque[_Sum] = deque()
        self._between: deque[_Sum] = deque()

    def keeps(self, buffer: GradBuffer, *, completes: bool) -> bool:
        """Whether a gradient is first added to the sum of the node. ``completes``: it is the last one."""
        if buffer not in self._comms:
            return False
        return buffer.node_sum_P is not None or not (completes or buffer.is_reduced)

    def reduce(self, buffer: GradBuffer, grads_N: Tensor, *, completes: bool) -> None:
        """Start the sum of a local gradient ``[N]`` inside the node; the last one ends the node's sum."""
        comm = self._comms[buffer]
        result_P = grads_N.new_empty(len(grads_N) // comm.inner.size)
        handle = comm.reduce_inside(real_view(result_P), real_view(grads_N), name=buffer.name)
        self._inside.append(_Sum(buffer, grads_N, result_P, handle, completes))
        buffer.begin_reduction(grads_N, result_P)
        buffer.report()
        self.drain(self._limit)

    def drain(self, keep: int) -> None:
        """Take over the oldest sums, so that at most ``keep`` are in flight on each hop."""
        while len(self._inside) > keep:
            buffer, _, result_P, handle, completes = self._inside.popleft()
            handle.wait()
            buffer.reducing_N = buffer.reduce_result_S = None
            result_P, before_P = result_P.to(buffer.unit.row.grad_accum), buffer.node_sum_P
            buffer.node_sum_P = result_P if before_P is None else before_P.add_(result_P)
            buffer.report()
            if completes:
                self._pass_on(buffer)
        while len(self._between) > keep:
            buffer, sum_P, result_S, passing, _ = self._between.popleft()
            passing.wait()
            buffer.end_reduction(sum_P, result_S, widen=False, whole=False, complete=True)
            buffer.report()

    def finish(self, order: Sequence[GradBuffer]) -> None:
        """End the sums of a step none of whose micro-batches was known to be the last."""
        for buffer in order:
            self._pass_on(buffer)
            self.drain(self._limit)
        self.drain(0)

    def _pass_on(self, buffer: GradBuffer) -> None:
        """Start the second hop of the buffer's sum, if it has one."""
        sum_P = buffer.node_sum_P
        if sum_P is None:
            return
        sum_P, buffer.node_sum_P = sum_P.to(buffer.unit.row.reduce), None
        result_S, handle = self._summed(buffer, sum_P)
        self._between.append(_Sum(buffer, sum_P, result_S, handle, True))
        buffer.begin_reduction(sum_P, result_S)
        buffer.report()

    def _summed(self, buffer: GradBuffer, sum_P: Tensor) -> tuple[Tensor, Handle]:
        """Start a second hop, which ``sum_P`` belongs to. Replicas add in place: P is S."""
        numel = buffer.unit.layout.shard_numel
        result_S = sum_P if numel == len(sum_P) else sum_P.new_empty(numel)
        comm = self._comms[buffer]
        return result_S, comm.reduce_between(
            real_view(result_S), real_view(sum_P), name=buffer.name
        )

    def summed(self, buffer: GradBuffer, node_sum_P: Tensor) -> Tensor:
        """The gradient ``[S]`` of all micro-batches so far. Collective. The buffer does not change."""
        result_S, handle = self._summed(buffer, node_sum_P.to(buffer.unit.row.reduce, copy=True))
        handle.wait()
        return result_S

    def abandon(self) -> None:
        """Wait for the sums in flight, whose results are not used."""
        for flight in (self._inside, self._between):
            while flight:
                flight.popleft().handle.wait()

    def forget(self) -> None:
        """Drop the sums in flight, which will never finish."""
        self._inside.clear()
        self._between.clear()
