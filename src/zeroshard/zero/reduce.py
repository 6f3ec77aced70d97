"""Reduces the gradients of all ranks into the shards that the optimizer reads.

Every trainable unit has a :class:`~zeroshard.zero.gradients.GradBuffer`. Buffers are reduced in one fixed
order that does not depend on what a rank ran; gradients that did not arrive count as zeros (ADR 0004).
Otherwise ranks would start collectives in different orders and wait for each other without end. In a
pipeline with several stages on a rank, a backward runs through one of them and reduces its buffers only.

A unit that is tied over pipeline stages is reduced once, at the end of the step and after all other
units. Inside the schedule its holders, which are on several stages, are not at the same place, and a
collective of them could wait for a message that waits for the collective.

Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.memory.storage import real_view
from zeroshard.zero.grad_buckets import BucketPolicy, GradLaunch, by_block
from zeroshard.zero.grad_ledger import report, report_begun, report_empty, report_ended
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.held_grads import DROP, GradEdit, HeldGrad, HeldGrads
from zeroshard.zero.node_sums import NodeSums

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Handle
    from zeroshard.comm.process_group import ProcessGroupComm
    from zeroshard.zero.copy_sums import CopySums

MAX_IN_FLIGHT = 2
"""The largest number of reductions in flight, if they overlap with backward. More would cost memory."""


class _Reduction(NamedTuple):
    buffer: GradBuffer
    grads_N: Tensor  # the input: its memory must live until the reduction has ended
    result_S: Tensor


class _InFlight(NamedTuple):
    handle: Handle
    launch: GradLaunch
    reductions: Sequence[_Reduction]


class BackwardKind(NamedTuple):
    """What one backward is in its optimizer step."""

    completes: bool  # it is the last one of its pipeline stage, so its gradients are reduced
    accumulates: bool  # the step sums the gradients of several backwards
    pipeline_stage: int = 0  # that it runs through
    rescale: Tensor | None = None  # 0-dim; its gradients are multiplied by it when they arrive


@dataclass(eq=False)
class GradReducer:
    """Reduces buffers during backward, the last one of forward first.

    ``eager``: reduce after every backward (stages 2 and 3). Otherwise the local sum is reduced once, at
    the accumulation boundary. ``predivide``: local gradients are divided by this before the
    reduction (``prescale_gradients``, ``gradient_predivide_factor``).
    ``whole``: every rank needs the whole reduced gradient (stage 0). ``in_flight_limit``: the largest
    number of reductions in flight; with 0 backward waits for each of them. ``policy``: which buffers are
    reduced together. ``node_sums``: keep sums inside their nodes until the last micro-batch.
    ``copy_sums``: add gradients over ranks that hold the same parts.
    """

    buffers: list[GradBuffer]
    _: KW_ONLY
    eager: bool
    whole: bool
    in_flight_limit: int
    policy: BucketPolicy = by_block
    predivide: float = 1.0
    node_sums: NodeSums | None = None
    copy_sums: Sequence[CopySums] = ()
    reducing: bool = False
    measure: Callable[[], Tensor | None] | None = None  # the norm of what is held; collective
    fragments: HeldGrads | None = None  # of the optimizer
    on_dropped: Callable[[], None] | None = None  # called when the program dropped all gradients
    _holds: bool = False  # gradients of a micro-batch
    waiting: bool = False  # gradients of a finished backward are not reduced yet
    _completes: bool = False  # the running backward is the last one of its step
    _accumulates: bool = False  # the running step sums several micro-batches
    _next: int = 0  # in ``_launches``
    _running: list[GradBuffer] = field(default_factory=list)  # of the running backward's stage
    _launches: list[GradLaunch] = field(default_factory=list)  # the same, by launch
    _in_flight: deque[_InFlight] = field(default_factory=deque)

    @cached_property
    def order(self) -> list[GradBuffer]:
        """The buffers in the order of their reductions: backward reaches the last unit first."""
        return self.buffers[::-1]

    def of_stage(self, stage: int) -> Sequence[GradBuffer]:
        """The buffers of one pipeline stage."""
        return self._orders.get(stage, ())

    @cached_property
    def _orders(self) -> dict[int | None, list[GradBuffer]]:
        """The buffers of each pipeline stage, in the order of their reductions. None: tied ones."""
        stages = dict.fromkeys(buffer.pipeline_stage for buffer in self.buffers)
        return {stage: [b for b in self.order if b.pipeline_stage == stage] for stage in stages}

    @cached_property
    def _launches_of(self) -> dict[int | None, list[GradLaunch]]:
        """The buffers of each pipeline stage by launch: those of a group are reduced together."""
        return {stage: self.policy(buffers) for stage, buffers in self._orders.items()}

    # ------------------------------------------------------------------ one backward

    def begin_backward(self, kind: BackwardKind) -> None:
        """To be called once per backward, before its first gradient."""
        self.reducing = self.eager or kind.completes
        self._completes, self._accumulates, stage, rescale = kind
        self._next, self._running = 0, self._orders.get(stage, [])
        self._launches = self._launches_of.get(stage, [])
        for sums in self.copy_sums:
            sums.begin_backward()
        sums_locally = self._accumulates and not self.eager
        for buffer in self._running:
            row, buffer.rescale = buffer.unit.row, rescale
            buffer.begin_backward(row.grad_accum if sums_locally else row.reduce)
        for buffer in self._orders.get(None, ()):
            buffer.begin_backward(buffer.unit.row.grad_accum)

    def finish_buffer(self, buffer: GradBuffer) -> None:
        """Note that backward gives no more gradients of the unit, and reduce buffers whose turn it is."""
        if buffer.complete:
            return
        buffer.complete = True
        launches = self._launches
        while self.reducing and self._next < len(launches):
            for other in launches[self._next].buffers:
                if not other.complete:
                    return
            self._launch_next()

    def end_backward(self) -> None:
        """Reduce the remaining buffers in the fixed order, the same on every rank."""
        for buffer in chain(self._running, self._orders.get(None, ())):
            buffer.end_backward()
        self.waiting = not self.reducing
        if self.waiting:
            return
        while self._next < len(self._launches):
            self._launch_next()
        for buffer in self._running:  # gradients that arrived after their buffer's reduction
            if buffer.grads_N is not None:
                self._launch(GradLaunch((buffer,)))
        self._drain(0)

    def _launch_next(self) -> None:
        launch = self._launches[self._next]
        self._next += 1
        self._launch(launch)

    # ------------------------------------------------------------------ one launch

    def _launch(self, launch: GradLaunch) -> None:
        """Start the reductions of one buffer or of a group."""
        buffers, node_sums = launch.buffers, self.node_sums
        if node_sums is not None and node_sums.keeps(buffers[0], completes=self._completes):
            assert launch.comm is None  # communicators of two hops join no launches
            node_sums.reduce(buffers[0], self._taken(buffers[0]), completes=self._completes)
            return
        is_first = launch.apart and not [b for b in buffers if b.reducing_N is not None]
        sums = [id(buffer.grads_N) for buffer in buffers]  # as reported
        reductions = [self._opened(buffer) for buffer in buffers]
        handle = (
            self._reduce_scatter(*reductions[0])
            if launch.comm is None
            else self._joint_reduce_scatter(launch.comm, reductions)
        )
        self._in_flight.append(_InFlight(handle, launch, reductions))
        for buffer, grads_N, result_S in reductions:
            buffer.begin_reduction(grads_N, result_S)
        if is_first and sums == [id(grads_N) for _, grads_N, _ in reductions]:
            report_begun(buffers, [result_S.nbytes for _, _, result_S in reductions])
        else:
            report(buffers)
        self._drain(self.in_flight_limit)

    def _opened(self, buffer: GradBuffer) -> _Reduction:
        """What the reduction of a buffer reads and writes. The buffer is empty afterwards."""
        layout = buffer.unit.layout
        if buffer.is_stored:
            buffer.prefetch()  # read back during the reduction, which adds to it
        grads_N = self._taken(buffer)
        if buffer.transient and buffer.comm.size > 1:
            result_S = grads_N.new_empty(layout.shard_numel)
        else:  # grads_N is kept
            result_S = grads_N[slice(*layout.shard_range(buffer.comm.rank))]
        return _Reduction(buffer, grads_N, result_S)

    def _taken(self, buffer: GradBuffer) -> Tensor:
        """The local gradient ``[N]`` as a reduction reads it. The buffer is empty afterwards."""
        grads_N, dtype = buffer.detach_local(), buffer.unit.row.reduce
        if self.predivide != 1.0:
            real_view(grads_N).div_(self.predivide)
        if grads_N.dtype is not dtype:
            with buffer.ledger.lend("cast", buffer.unit.layout.full_numel * dtype.itemsize):
                grads_N = grads_N.to(dtype)
        return grads_N

    def _reduce_scatter(self, buffer: GradBuffer, grads_N: Tensor, target_S: Tensor) -> Handle:
        """Start the sum over ranks. A part of it would have to be copied first, and waited for."""
        return buffer.comm.reduce_scatter(
            real_view(target_S), real_view(grads_N), name=buffer.unit.name
        )

    def _joint_reduce_scatter(
        self, comm: ProcessGroupComm, reductions: Sequence[_Reduction]
    ) -> Handle:
        return comm.joint_reduce_scatter(
            [real_view(result_S) for _, _, result_S in reductions],
            [real_view(grads_N) for _, grads_N, _ in reductions],
            name=reductions[0].buffer.unit.group,
        )

    def _drain(self, keep: int) -> None:
        if self.node_sums is not None:
            self.node_sums.drain(keep)
        widen = self.eager and self._accumulates
        while len(self._in_flight) > keep:
            handle, launch, reductions = self._in_flight.popleft()
            handle.wait()
            buffers = launch.buffers
            is_first = launch.apart and not widen and not self.whole
            if is_first:
                is_first = not [b for b in buffers if b.is_reduced or b.grads_N is not None]
            for buffer, grads_N, result_S in reductions:
                buffer.end_reduction(
                    grads_N, result_S, widen=widen, whole=self.whole, complete=self._completes
                )
            if is_first:
                report_ended(buffers, [result_S.nbytes for _, _, result_S in reductions])
            else:
                report(buffers)

    # ------------------------------------------------------------------ what the program sees

    def show(self, *, counted: bool) -> None:
        """Let the program find stand-ins in ``.grad``. ``counted``: a micro-batch gave gradients.

        On one rank only parameters with a gradient have one. On several ranks all that are trained do,
        because other ranks may have given theirs a gradient, and all ranks must see the same.
        """
        self._holds = self._holds or counted
        if not self._holds:
            return
        for buffer in self.buffers:
            alone = buffer.comm.size == 1
            buffer.stand_ins.show(buffer.has_grad if alone else None, self)
        if self.fragments is not None:
            self.fragments.show(None, None)

    def settle(self, *, hides: bool = False, landed: Tensor | None = None) -> None:
        """Take over what the program did to ``.grad``. See [Note: held gradients]. No message.

        ``hides``: a backward begins. ``landed``: a parameter whose gradient came before this call.

        Raises:
            UsageError: a gradient was assigned.
        """
        if not self._holds:
            return
        if self.fragments is not None and self.fragments.settle():
            raise UsageError(
                ".grad of the optimizer's own params was set to None. The optimizer has parts of the "
                "parameters, whose gradients are stored elsewhere. Call optimizer.zero_grad(), or set "
                ".grad of the model's parameters to None."
            )
        shown = sum(len(buffer.stand_ins.shown) for buffer in self.buffers)
        found = [(buffer, buffer.stand_ins.settle(landed)) for buffer in self.buffers]
        found = [(buffer, changes) for buffer, changes in found if changes]
        if found and self._take_over(found, shown):
            return
        if hides:
            self._hide()

    def _take_over(self, found: Sequence[tuple[GradBuffer, list[GradEdit]]], shown: int) -> bool:
        """Do what was done to the ``shown`` stand-ins. Returns whether it drops all gradients."""
        for buffer, changes in found:
            done = [f"{op} {index}" for index, op, _ in changes]
            buffer.comm.recorder.note("gradients", buffer.unit.name, *done)
        # By buffer: the last change of each slot.
        ends = [(buffer, {index: op for index, op, _ in changes}) for buffer, changes in found]
        cleared = sum(op in (DROP, "zero_") for _, last in ends for op in last.values())
        if not cleared or cleared != shown:
            for buffer, changes in found:
                buffer.change(changes)
            return False
        self.abandon()
        for buffer, last in ends:  # as in PyTorch, a parameter whose gradient is 0 has one
            for index in [index for index, op in last.items() if op == "zero_"]:
                buffer.has_grad[index] = True
        if self.on_dropped is not None:
            self.on_dropped()
        return True

    def _hide(self) -> None:
        for buffer in self.buffers:
            buffer.stand_ins.hide()
        if self.fragments is not None:
            self.fragments.hide()

    def norm_of(self, grads: Sequence[HeldGrad]) -> Tensor:
        """See :class:`~zeroshard.zero.held_grads.Holder`."""
        held = {id(grad) for buffer in self.buffers for grad in buffer.stand_ins.grads()}
        given = {id(grad) for grad in grads}
        if held != given:
            raise UsageError(
                f"the norm of {len(given)} gradients was asked for, {len(given & held)} of which are "
                f"among the {len(held)} that one engine holds: only all of them have a norm together. "
                "Pass all trained parameters of one engine. Read single gradients with "
                "zeroshard.zero.safe_get_full_grad(param); to clip, the key gradient_clipping works too."
            )
        self.settle()
        norm = None if self.measure is None else self.measure()
        if norm is None:
            raise UsageError(
                'the norm of the gradients was asked for, with "compute_grad_norm": false in the '
                "configuration or without an optimizer. Leave that key out."
            )
        return norm

    # ------------------------------------------------------------------ the step

    def finish(self) -> None:
        """Reduce everything that arrived, and add what is to be added over the tensor group. At stage 0,
        give every rank the whole gradient."""
        if self.node_sums is not None:
            self.node_sums.finish(self.order)
        left = [buf for buf in self.order if buf.grads_N is not None or not buf.is_reduced]
        if left:
            self.reducing, self.waiting, self._running, self._launches = True, False, [], []
            self._completes = True
            for launch in self.policy(left):
                self._launch(launch)
            self._drain(0)
        for sums in self.copy_sums:
            sums.finish()
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
        values_S = self._summed_over_holders(buffer)
        if values_S is not None:
            for sums in self.copy_sums:
                values_S = sums.added(buffer, values_S)
        return values_S

    def _summed_over_holders(self, buffer: GradBuffer) -> Tensor | None:
        if self.node_sums is not None and buffer.node_sum_P is not None:
            return self.node_sums.summed(buffer, buffer.node_sum_P)
        if not self.waiting:
            return buffer.peek()
        layout, row = buffer.unit.layout, buffer.unit.row
        grads_N = torch.zeros(
            layout.full_numel, dtype=row.grad_accum, device=buffer.unit.full_N.device
        )
        for slot, view, filled in zip(layout.slots, buffer.views, buffer.filled, strict=False):
            if filled:
                grads_N[slot.start : slot.stop].view(slot.shape).copy_(view)
        real_view(grads_N).div_(self.predivide)
        grads_N = grads_N.to(row.reduce)
        sum_S = torch.empty(layout.shard_numel, dtype=row.reduce, device=grads_N.device)
        self._reduce_scatter(buffer, grads_N, sum_S).wait()
        before_S = buffer.peek()
        return sum_S if before_S is None else before_S + sum_S

    def abandon(self) -> None:
        """Drop the gradients of a backward that an exception ended.

        Waits for reductions in flight.
        """
        while self._in_flight:
            self._in_flight.popleft().handle.wait()
        if self.node_sums is not None:
            self.node_sums.abandon()
        self.reset()

    def close(self, *, wait: bool = True) -> None:
        """Free all gradients. ``wait=False``: drop reductions in flight, which will never finish."""
        try:
            if wait:
                self.abandon()
        finally:
            self._in_flight.clear()
            if self.node_sums is not None:
                self.node_sums.forget()
            self.abandon()

    def reset(self) -> None:
        """Free the gradients after the update."""
        for buffer in self.buffers:
            buffer.reset()
        report_empty(self.buffers)
        for sums in self.copy_sums:
            sums.reset()
        if self.fragments is not None:
            self.fragments.hide()
        self.reducing = self.waiting = self._holds = False
        self._running, self._launches = [], []
