"""What does this rank hold of one unit's gradients?

A gradient that arrives is moved into its slot; a second arrival *adds*: there is no "already reduced"
state. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.memory import storage
from zeroshard.offload.swapped_storage import distinct
from zeroshard.zero.unit import Unit, offloaded_error

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.offload.grad_store import GradStore


def accumulate(into: Tensor, values: Tensor) -> None:
    """``into += values`` without a mixed-dtype kernel, which is many times slower on CPU."""
    into.add_(values if values.dtype == into.dtype else values.to(into.dtype))


Norms = list[tuple[int, Tensor]]
"""A parameter's position in the model, and the 2-norm of what this rank owns of its gradient."""


class GradBuffer:
    """Gradients of one unit: the local sum ``grads_N``, and what was reduced so far.

    The optimizer reads ``reduced_S`` where its state is sharded, ``reduced_N`` at stage 0.
    ``transient``: the local sum exists only until its reduction (stages 2 and 3). ``rest``: where what
    was reduced waits; default here.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        comm: Comm,
        ledger: Ledger,
        transient: bool,
        rest: GradStore | None = None,
    ) -> None:
        self.unit = unit
        self.comm = comm
        self.ledger = ledger
        self.transient = transient
        self.grads_N: Tensor | None = None
        self.reducing_N: Tensor | None = None  # the source of a reduction in flight
        self.reduce_result_S: Tensor | None = None  # and its result
        self.views: list[Tensor] = []
        self.filled = [False] * len(unit.params)  # slots of grads_N that hold a gradient
        self.has_grad = [False] * len(
            unit.params
        )  # parameters with any gradient since the last step
        self.num_ready = 0  # in the running backward
        self.complete = False  # nothing more is expected in the running backward
        self._reduced_S: Tensor | None = None
        self.reduced_N: Tensor | None = None
        self.store = rest
        self.is_stored = False  # is what was reduced at its rest, and not here?
        self.measure: Callable[[Tensor], Norms] | None = None  # what the optimizer owns
        self.norms: Norms | None = None  # of a complete gradient, taken when it left
        self.tier = Tier.DEVICE  # HOST: all of it left the device for now

    @property
    def reduced_S(self) -> Tensor | None:  # noqa: N802  (the suffix is the extent)
        """The reduced gradient of the running step, for whoever changes it or uses it up; None before
        there is one. One that left comes back, and is counted at its rest until it leaves again."""
        if self.is_stored:
            assert self.store is not None
            self.reduced_S = self.store.acquire()
        return self._reduced_S

    @reduced_S.setter
    def reduced_S(self, values_S: Tensor | None) -> None:  # noqa: N802
        self.is_stored, self.norms = False, None
        self._reduced_S = values_S

    @property
    def is_reduced(self) -> bool:
        """Is there a reduced gradient, here or where its update is?"""
        return self.is_stored or self._reduced_S is not None

    def peek(self) -> Tensor | None:
        """The reduced gradient, for whoever reads it only: it stays where it is."""
        if self.is_stored:
            assert self.store is not None
            return self.store.peek()
        return self._reduced_S

    def store_reduced(self, *, complete: bool) -> None:
        """What was reduced goes to its rest, beside the rest of backward. ``complete``: nothing more is
        expected in this step; then it is measured, so that the norm does not call it back."""
        rest, values_S = self.store, self._reduced_S
        if rest is None or values_S is None or not (complete or rest.every_backward):
            return
        rest.write(values_S)
        self.reduced_S, self.is_stored = None, True
        if complete and self.measure is not None:
            self.norms = self.measure(values_S)

    def prefetch(self) -> None:
        """The reduced gradient will be needed soon."""
        if self.is_stored:
            assert self.store is not None
            self.store.prefetch()

    def discard_reduced(self) -> None:
        """The update is through with a gradient that has another rest: its memory goes."""
        if self.store is not None:
            self.reduced_S = None
            self.store.free()

    def allocate(self, dtype: torch.dtype) -> Tensor:
        """Allocate ``grads_N``; its contents are undefined until filled."""
        unit = self.unit
        self.grads_N = self.comm.allocate(
            unit.layout.full_numel, dtype=dtype, device=unit.full_N.device
        )
        self._set_views()
        self.report()
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
        self.filled[0] = self.has_grad[0] = True
        self.report()

    def _set_views(self) -> None:
        assert self.grads_N is not None
        self.views = [
            self.grads_N[slot.start : slot.stop].view(slot.shape) for slot in self.unit.layout.slots
        ]

    def accumulate_grad(self, index: int, grad: Tensor, dtype: torch.dtype) -> None:
        """Move one gradient into its slot, or add it to what is there."""
        if self.grads_N is None:
            if self._is_whole(grad, dtype):
                self.adopt(grad)
                return
            self.allocate(dtype)
        if not self.filled[index]:
            self.views[index].copy_(grad)
            self.filled[index] = True
        else:
            self._promote()
            accumulate(self.views[index], grad)
        self.has_grad[index] = True

    def _promote(self) -> None:
        """Sums are kept in the accumulation dtype, also when they were not expected."""
        assert self.grads_N is not None
        if self.grads_N.dtype != self.unit.row.grad_accum:
            self.grads_N = self.grads_N.to(self.unit.row.grad_accum)
            self._set_views()
            self.report()

    def detach_local(self) -> Tensor:
        """The complete local gradient ``[N]``, zeros where nothing arrived; the buffer starts anew."""
        if self.grads_N is None:
            self.allocate(self.unit.row.reduce)
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
        self.reducing_N = self.reduce_result_S = None
        self.reduced_S = self.reduced_N = None
        self.discard_reduced()
        self.filled = [False] * len(self.filled)
        self.has_grad = [False] * len(self.has_grad)
        self.num_ready = 0
        self.report()

    def check_not_offloaded(self) -> None:
        """Raise :class:`UsageError` while gradients are away."""
        if self.tier is not Tier.DEVICE:
            raise offloaded_error(f"the gradient of {self.unit.name!r}")

    def held(self) -> list[Tensor]:
        """All bytes that are held here between two backwards."""
        return distinct(t for t in (self.grads_N, self._reduced_S, self.reduced_N) if t is not None)

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

        self.grads_N, self._reduced_S, self.reduced_N = map(
            moved, (self.grads_N, self._reduced_S, self.reduced_N)
        )
        if self.grads_N is not None:
            self._set_views()
        self.ledger.hold("gradients", self.unit.name, 0, self.tier)
        self.tier = tier
        self.ledger.hold("gradients", self.unit.name, sum(here.nbytes for here in held), tier)

    def report(self) -> None:
        """Report to the ledger what is held here."""
        local = [self.grads_N, self.reducing_N]
        resting = [self._reduced_S, self.reduced_N] + ([] if self.transient else local)
        self.ledger.hold("gradients", self.unit.name, _storage_nbytes(resting), self.tier)
        if self.transient:
            leaving_nbytes = _storage_nbytes(local)
            arriving_nbytes = _storage_nbytes([*local, self.reduce_result_S]) - leaving_nbytes
            self.ledger.hold("buckets", self.unit.name, leaving_nbytes)
            self.ledger.hold("scratch", self.unit.name, arriving_nbytes)


def _storage_nbytes(tensors: Sequence[Tensor | None]) -> int:
    """Bytes behind the tensors; slices of one storage count once."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    if len(storages) < 2:
        return storages[0].nbytes() if storages else 0
    return sum({s._cdata: s.nbytes() for s in storages}.values())
