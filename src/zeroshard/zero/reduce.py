"""How do gradients travel from autograd to the shards that the optimizer reads?

Every trainable unit has a :class:`GradBuffer`. A gradient that arrives is moved into the buffer's slot;
a second arrival *adds*: there is no "already reduced" state. Buffers are reduced in one fixed order that
does not depend on what a rank happened to run; gradients that did not arrive count as zeros.

Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import UnsupportedError
from zeroshard.store import storage
from zeroshard.store.luggage import distinct
from zeroshard.zero.unit import Unit, away_error

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

MAX_IN_FLIGHT = 2
"""Reductions in flight while backward goes on; more only costs memory."""


def accumulate(into: Tensor, values: Tensor) -> None:
    """``into += values`` without a mixed-dtype kernel, which is many times slower on CPU."""
    into.add_(values if values.dtype == into.dtype else values.to(into.dtype))


class GradBuffer:
    """Gradients of one unit: the local sum ``grads_N``, and what was reduced so far.

    The optimizer reads ``reduced_S`` where its state is sharded, ``reduced_N`` at stage 0.
    ``transient``: the local sum exists only until its reduction (stages 2 and 3).
    """

    def __init__(self, unit: Unit, *, comm: Comm, ledger: Ledger, transient: bool) -> None:
        self.unit = unit
        self.comm = comm
        self.ledger = ledger
        self.transient = transient
        self.grads_N: Tensor | None = None
        self.leaving_N: Tensor | None = None  # the source of a reduction in flight
        self.arriving_S: Tensor | None = None  # and its result
        self.views: list[Tensor] = []
        self.filled = [False] * len(unit.params)  # slots of grads_N that hold a gradient
        self.touched = [False] * len(
            unit.params
        )  # parameters with any gradient since the last step
        self.arrived = 0  # in the running backward
        self.complete = False  # nothing more is expected in the running backward
        self._reduced_S: Tensor | None = None
        self.reduced_N: Tensor | None = None
        self.sends: Callable[[Tensor], Callable[[], Tensor]] | None = None  # see leave()
        self._recall: Callable[[], Tensor] | None = None
        self.tier = Tier.DEVICE  # HOST: all of it left the device for now

    @property
    def reduced_S(self) -> Tensor | None:  # noqa: N802  (the suffix is the extent)
        """The reduced gradient of the running step on the device; None before there is one.

        One that left comes back for whoever asks.
        """
        if self._recall is not None:
            recall, self._recall = self._recall, None
            self._reduced_S = recall()
            self.account()
        return self._reduced_S

    @reduced_S.setter
    def reduced_S(self, values_S: Tensor | None) -> None:  # noqa: N802
        self._recall = None
        self._reduced_S = values_S

    @property
    def is_reduced(self) -> bool:
        """Is there a reduced gradient, here or where its update is?"""
        return self.has_left or self._reduced_S is not None

    @property
    def has_left(self) -> bool:
        """Is the reduced gradient in host memory, where its update is, and not here?"""
        return self._recall is not None

    def leave(self) -> None:
        """The gradient of the step is complete. If it is updated in host memory it goes there now, beside
        the rest of backward: ``sends(reduced_S)`` starts that and returns what would bring it back."""
        if self.sends is not None and self._reduced_S is not None:
            recall = self.sends(self._reduced_S)
            self._reduced_S, self._recall = None, recall

    def open(self, dtype: torch.dtype) -> Tensor:
        """Allocate ``grads_N``; its contents are undefined until filled."""
        unit = self.unit
        self.grads_N = self.comm.empty(
            unit.layout.full_numel, dtype=dtype, device=unit.full_N.device
        )
        self._set_views()
        self.account()
        return self.grads_N

    def _is_whole(self, grad: Tensor, dtype: torch.dtype) -> bool:
        """Is this gradient all of ``grads_N`` already? So it is where one matrix makes the unit."""
        return (
            len(self.unit.params) == 1
            and grad.numel() == self.unit.layout.full_numel
            and grad.dtype == dtype
            and grad.is_contiguous()
            and not grad.requires_grad  # with a graph of its own it is the program's too
            and grad.untyped_storage().nbytes() == grad.nbytes
            and not storage.is_aliased(grad)  # ``a + b.view(...)`` gives both one memory
        )

    def adopt(self, grad: Tensor) -> None:
        """Take the gradient itself for ``grads_N``. Autograd gave it away, alone."""
        self.grads_N = grad.detach().view(-1)
        self._set_views()
        self.filled[0] = self.touched[0] = True
        self.account()

    def _set_views(self) -> None:
        assert self.grads_N is not None
        self.views = [
            self.grads_N[slot.start : slot.stop].view(slot.shape) for slot in self.unit.layout.slots
        ]

    def land(self, index: int, grad: Tensor, dtype: torch.dtype) -> None:
        """Move one gradient into its slot, or add it to what is there."""
        if self.grads_N is None:
            if self._is_whole(grad, dtype):
                self.adopt(grad)
                return
            self.open(dtype)
        if not self.filled[index]:
            self.views[index].copy_(grad)
            self.filled[index] = True
        else:
            self._promote()
            accumulate(self.views[index], grad)
        self.touched[index] = True

    def _promote(self) -> None:
        """Sums are kept in the accumulation dtype, also when they were not expected."""
        assert self.grads_N is not None
        if self.grads_N.dtype != self.unit.row.grad_accum:
            self.grads_N = self.grads_N.to(self.unit.row.grad_accum)
            self._set_views()
            self.account()

    def take(self) -> Tensor:
        """The complete local gradient ``[N]``, zeros where nothing arrived; the buffer starts anew."""
        if self.grads_N is None:
            self.open(self.unit.row.reduce)
        assert self.grads_N is not None
        for view, filled in zip(self.views, self.filled, strict=True):
            if not filled:
                view.zero_()
        taken, self.grads_N, self.views = self.grads_N, None, []
        self.filled = [False] * len(self.filled)
        return taken

    def add_reduced(self, values_S: Tensor) -> None:
        """One more reduced gradient of the same step."""
        if self.reduced_S is None:
            self.reduced_S = values_S
            return
        if self.reduced_S.dtype != self.unit.row.grad_accum:
            self.reduced_S = self.reduced_S.to(self.unit.row.grad_accum)
        accumulate(self.reduced_S, values_S)

    def reset(self) -> None:
        """Forget the step's gradients and free them."""
        self.grads_N, self.views = None, []
        self.leaving_N = self.arriving_S = self.reduced_S = self.reduced_N = (
            None  # and what has left
        )
        self.filled = [False] * len(self.filled)
        self.touched = [False] * len(self.touched)
        self.arrived = 0
        self.account()

    def check_here(self) -> None:
        """Raise :class:`UsageError` while gradients are away."""
        if self.tier is not Tier.DEVICE:
            raise away_error(f"the gradient of {self.unit.name!r}")

    def held(self) -> list[Tensor]:
        """All bytes that are held between two backwards."""
        return distinct(t for t in (self.grads_N, self.reduced_S, self.reduced_N) if t is not None)

    def move(self, tier: Tier, carry: Callable[[Tensor], Tensor]) -> None:
        """Gradients go to another kind of memory, if they are not there. ``carry`` copies bytes."""
        if tier is self.tier:
            return
        held = self.held()
        there = {here.untyped_storage()._cdata: carry(here) for here in held}

        def moved(flat: Tensor | None) -> Tensor | None:
            if flat is None or not flat.numel():
                return flat
            begin = flat.storage_offset() * flat.element_size()
            copy = there[flat.untyped_storage()._cdata]
            return copy[begin : begin + flat.nbytes].view(flat.dtype)

        self.grads_N, self.reduced_S, self.reduced_N = map(
            moved, (self.grads_N, self.reduced_S, self.reduced_N)
        )
        if self.grads_N is not None:
            self._set_views()
        self.ledger.hold("gradients", self.unit.name, 0, self.tier)
        self.tier = tier
        self.ledger.hold("gradients", self.unit.name, sum(here.nbytes for here in held), tier)

    def account(self) -> None:
        """Report to the ledger what is held here."""
        local = [self.grads_N, self.leaving_N]
        resting = [self._reduced_S, self.reduced_N] + ([] if self.transient else local)
        self.ledger.hold("gradients", self.unit.name, _storage_nbytes(resting), self.tier)
        if self.transient:
            leaving_nbytes = _storage_nbytes(local)
            arriving_nbytes = _storage_nbytes([*local, self.arriving_S]) - leaving_nbytes
            self.ledger.hold("buckets", self.unit.name, leaving_nbytes)
            self.ledger.hold("scratch", self.unit.name, arriving_nbytes)


def _storage_nbytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes behind the tensors; slices of one storage count once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    if len(storages) < 2:
        return storages[0].nbytes() if storages else 0
    return sum({s._cdata: s.nbytes() for s in storages}.values())


@dataclass(frozen=True, slots=True)
class _InFlight:
    buffer: GradBuffer
    handles: list[Handle]
    target_S: Tensor
    source: Tensor  # kept alive until the reduction is through


class GradReducer:
    """Reduces buffers during backward, in the order given, and keeps at most a few in flight.

    ``eager``: reduce every backward into the owner's shard (stages 2 and 3). Otherwise the local sum is
    reduced once, at the accumulation boundary. ``bucket_numel``: elements reduced together at most
    (``reduce_bucket_size``), rounded up to 64 per rank. ``predivide``: local gradients are divided by
    this before the reduction (``prescale_gradients``, ``gradient_predivide_factor``).
    ``whole``: every rank needs the whole reduced gradient (stage 0).
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
        self.order = list(reversed(self.buffers))  # backward meets the last unit first
        self.eager = eager
        self.whole = whole
        self.expects_accumulation = expects_accumulation
        self.bucket_numel = bucket_numel
        self.in_flight_limit = MAX_IN_FLIGHT if overlap else 0
        self.predivide = predivide
        self.reducing = False
        self.waiting = False  # gradients of a finished backward are still local
        self._completes = False  # does the running backward complete a step's gradients?
        self._next = 0
        self._in_flight: deque[_InFlight] = deque()

    # ------------------------------------------------------------------ one backward

    def begin_backward(self, *, boundary: bool) -> None:
        """Called once per backward, before its first gradient."""
        self.reducing = self.eager or boundary
        self._completes = boundary
        self._next = 0
        for buffer in self.buffers:
            buffer.arrived, buffer.complete = 0, False

    def land(self, buffer: GradBuffer, index: int, param: nn.Parameter) -> None:
        """A gradient was accumulated into ``param.grad``: take it."""
        grad = param.grad
        assert grad is not None
        param.grad = None
        if grad.is_sparse:
            raise UnsupportedError(
                f"parameter {buffer.unit.layout.slots[index].fqn!r} has a sparse gradient; ZeRO "
                "reduces dense flat gradients. Use sparse=False in the embedding."
            )
        buffer.land(index, grad, self._landing_dtype(buffer.unit))
        buffer.arrived += 1
        if buffer.arrived == len(buffer.unit.params):
            self.finish_buffer(buffer)

    def finish_buffer(self, buffer: GradBuffer) -> None:
        """Backward is through with the unit: it may be reduced as soon as it is its turn."""
        buffer.complete = True
        while self.reducing and self._next < len(self.order) and self.order[self._next].complete:
            self._launch_next()

    def _landing_dtype(self, unit: Unit) -> torch.dtype:
        many = not self.eager and self.expects_accumulation()
        return unit.row.grad_accum if many else unit.row.reduce

    def end_backward(self) -> None:
        """Reduce the rest in the fixed order, so that all ranks issue the same collectives."""
        self.waiting = not self.reducing
        if self.waiting:
            return
        while self._next < len(self.order):
            self._launch_next()
        for buffer in self.order:  # gradients that came after their buffer had left
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
        grads_N = buffer.take()
        if self.predivide != 1.0:
            grads_N.div_(self.predivide)
        if grads_N.dtype != unit.row.reduce:
            with buffer.ledger.lend("cast", layout.full_numel * unit.row.reduce.itemsize):
                grads_N = grads_N.to(unit.row.reduce)
        begin, end = layout.shard_range(buffer.comm.rank)
        # Whole gradients rest in place (stages 0 and 1); a true shard is a tensor of its own.
        apart = self.eager and buffer.comm.world_size > 1
        target_S = torch.empty_like(grads_N[begin:end]) if apart else grads_N[begin:end]
        handles = self._reduce_scatter(buffer, target_S, grads_N)
        self._in_flight.append(_InFlight(buffer, handles, target_S, grads_N))
        buffer.leaving_N, buffer.arriving_S = grads_N, target_S
        buffer.account()
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
                handle.wait()  # small buckets exist to bound memory: one at a time
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
            buffer.leaving_N = buffer.arriving_S = None
            if self._completes:
                buffer.leave()
            buffer.account()

    # ------------------------------------------------------------------ the step

    def finish(self) -> None:
        """Everything that arrived is reduced; at stage 0 every rank gets the whole gradient."""
        if any(buffer.grads_N is not None for buffer in self.buffers) or any(
            not buffer.is_reduced for buffer in self.buffers
        ):
            self.reducing, self.waiting, self._next = True, False, len(self.order)
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
            buffer.account()

    def summed(self, buffer: GradBuffer) -> Tensor | None:
        """The reduced gradient ``[S]`` of all backwards since the last step; None before the first.

        Collective. What waits for its reduction is reduced in a copy: a reader changes nothing.
        """
        buffer.check_here()
        if not self.waiting:
            return buffer.reduced_S
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
        return sum_S if buffer.reduced_S is None else buffer.reduced_S + sum_S

    def abandon(self) -> None:
        """Forget a backward that an exception ended; reductions in flight are waited for."""
        while self._in_flight:
            for handle in self._in_flight.popleft().handles:
                handle.wait()
        self.reset()

    def close(self, *, wait: bool = True) -> None:
        """Give all gradients back; ``wait=False`` drops reductions that will never finish."""
        try:
            if wait:
                self.abandon()
        finally:
            self._in_flight.clear()
            self.abandon()

    def reset(self) -> None:
        """After the update: gradients are used up."""
        for buffer in self.buffers:
            buffer.reset()
        self.reducing = self.waiting = False
