"""The gradient buffer of one unit: its local sum, and its reduced gradient until the update.

[Note: gradients]

*Letters* as in [Note: units] of ``zero/unit.py``.

*Life of a gradient.* Autograd accumulates into ``param.grad``. A hook takes it from there. It waits until
the unit has all its gradients, or until ``GROUP_NUMEL`` elements wait. Then all that wait are copied into
their slots of ``grads_N``, the local sum, by one kernel. ``detach_local`` hands ``grads_N`` to a
reduce-scatter. Its result is added to ``reduced_S``, which the update reads. At stage 0 an all-gather
makes ``reduced_N`` of the shards. ``reset`` frees all of them after the update. Between two backwards no
gradient waits.

*Several backwards.* Where dtypes allow it, the slot of a parameter is lent to ``param.grad`` during later
backwards, and autograd adds to it in place: the same addition, without a copy and a call from Python.

*Arrivals add.* A second gradient of a parameter is added to its slot. One that arrives after the unit's
reduction opens a new ``grads_N``, which is reduced as well and added. There is no state "already reduced"
in which a gradient would be lost.

*Fixed extent.* Slots without gradient count as zeros, so that all ranks reduce all of ``N`` elements,
whatever they ran (ADR 0004). ``has_grad`` records which parameters got a gradient on this rank: a
parameter without one on any rank is left out of the update.

*Who owns which memory.* The buffer owns ``grads_N``. During a reduction that memory is ``reducing_N`` and
belongs to the collective; writing to it would corrupt the sum. At stages 2 and 3 (``transient``) it is
freed after the reduction. At stages 0 and 1, and on one rank, ``reduced_S`` is a slice of it. If a
:class:`~zeroshard.offload.grad_store.GradStore` is given, the reduced gradient is moved there between
reduction and update (``is_stored``), and the buffer holds nothing. Its norms are measured at that time,
so that clipping does not read it back (ADR 0008).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from zeroshard.comm.dtensors import KINDS, distributed, local_grad
from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import UnsupportedError
from zeroshard.memory import storage
from zeroshard.offload.swapped_storage import distinct
from zeroshard.zero.grad_ledger import report, report_new
from zeroshard.zero.held_grads import DROP, GradEdit, HeldGrads, apply
from zeroshard.zero.unit import Unit, offloaded_error

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm
    from zeroshard.offload.grad_store import GradStore
    from zeroshard.zero.addends import AddendSlots

GROUP_NUMEL = 2**18
"""At most this many elements of gradients wait to be copied together.

A copy of a larger gradient takes longer than the host needs to start it. The ledger counts the gradients
of a group once, while they are copied: then they and the slots are in memory.
"""


_first: Callable[[tuple[int, Tensor]], int] = itemgetter(0)


def accumulate(into: Tensor, values: Tensor) -> None:
    """``into += values``, with a cast first: mixed-dtype kernels are many times slower on CPU."""
    into.add_(values if values.dtype == into.dtype else values.to(into.dtype))


Norms = list[tuple[int, Tensor]]
"""Pairs of a parameter's position in the model and the 2-norm of this rank's part of its gradient."""


class GradBuffer:
    """Gradients of one unit: the local sum ``grads_N`` and the reduced gradient. See [Note: gradients].

    The optimizer reads ``reduced_S`` where its state is sharded, ``reduced_N`` at stage 0. ``transient``:
    the local sum is freed by its reduction (stages 2 and 3). ``rest``: the gradient store; None keeps the
    reduced gradient here. ``pipeline_stage``: the stage that has the unit. None: it is tied over several
    stages, so backwards of all of them add to ``grads_N``, which is reduced at the end of the step.
    ``group_numel``: instead of :data:`GROUP_NUMEL`.
    """

    def __init__(
        self,
        unit: Unit,
        *,
        comm: Comm,
        ledger: Ledger,
        transient: bool,
        rest: GradStore | None = None,
        pipeline_stage: int | None = 0,
        group_numel: int | None = None,
    ) -> None:
        self.unit = unit
        self.name = unit.name
        self._group_numel = GROUP_NUMEL if group_numel is None else group_numel
        self.pipeline_stage = pipeline_stage
        self.comm = comm
        self.ledger = ledger
        self.transient = transient
        self.grads_N: Tensor | None = None
        self.reducing_N: Tensor | None = None  # the input of the reduction in flight
        self.reduce_result_S: Tensor | None = None  # its output
        self._views: list[Tensor] | None = None  # of grads_N, by slot; None: not made yet
        # By slot: is there a gradient, in grads_N or waiting?
        self.filled = [False] * len(unit.params)
        self._waiting: dict[int, Tensor] = {}  # by slot: gradients that are not in grads_N yet
        self._waiting_numel = 0
        # By slot: ``param.grad`` is the slot of ``grads_N``.
        self._lent = [False] * len(unit.params)
        self._is_lent = False  # any of them
        # No hook tells of gradients: all slots are lent, or none is filled.
        self.is_unwatched = False
        self._version = 0  # of grads_N when an unwatched backward began
        self.has_grad = [False] * len(unit.params)  # by slot: any gradient since the last step?
        self.num_ready = 0  # gradients that arrived in the running backward
        self._local_dtype = unit.row.reduce
        self.rescale: Tensor | None = None  # 0-dim: what gradients of the running backward lack
        self.complete = False  # the running backward gives no more gradients
        self.node_sum_P: Tensor | None = None  # of this step's micro-batches: see [Note: node sums]
        self._reduced_S: Tensor | None = None
        self.reduced_N: Tensor | None = None
        self.store = rest
        self.is_stored = False  # the reduced gradient is in the gradient store, not here
        self.measure: Callable[[Tensor], Norms] | None = None  # set by the optimizer
        self.norms: Norms | None = None  # of a complete gradient, measured when it was stored
        self.tier = Tier.DEVICE  # HOST: offload_states() moved all gradients to the host
        self.reported = [0, 0, 0]  # bytes in each category of ``grad_ledger.py``
        self._num_params = len(unit.params)
        self._has_dtensors = bool(distributed(unit.params))
        # What the program finds in ``.grad`` between backward and step.
        self.stand_ins = HeldGrads(unit.params, [slot.fqn for slot in unit.layout.slots])
        self.addends: list[AddendSlots] = []  # one for each group of ranks with the same parts
        self._numels = [slot.numel for slot in unit.layout.slots]
        self._is_matrix = self._numels == [unit.layout.full_numel]  # one parameter, and no padding
        self._places = [
            (slot.shape, _contiguous(slot.shape), slot.start) for slot in unit.layout.slots
        ]

    @property
    def reduced_S(self) -> Tensor | None:  # noqa: N802  (the suffix is the extent)
        """The reduced gradient of this step, to be changed or used up; None before there is one.

        If it is in the gradient store, it is acquired from there. The ledger counts it in the store until
        it is stored again.
        """
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
        """Whether there is a reduced gradient, here or in the gradient store."""
        return self.is_stored or self._reduced_S is not None

    def peek(self) -> Tensor | None:
        """The reduced gradient for reading only: a stored one stays in its store."""
        if self.is_stored:
            assert self.store is not None
            return self.store.peek()
        return self._reduced_S

    def store_reduced(self, *, complete: bool) -> None:
        """Start moving the reduced gradient to the gradient store, while backward goes on.

        ``complete``: it is the whole gradient of the step. Then its norms are measured at once, so
        that clipping need not read it back.
        """
        rest, values_S = self.store, self._reduced_S
        if rest is None or values_S is None or not (complete or rest.every_backward):
            return
        for slots in self.addends:
            slots.keep(values_S)
        rest.write(values_S)
        self.reduced_S, self.is_stored = None, True
        if complete and self.measure is not None:
            self.norms = self.measure(values_S)

    def prefetch(self) -> None:
        """Start reading a stored gradient, which will be needed soon."""
        if self.is_stored:
            assert self.store is not None
            self.store.prefetch()

    def discard_reduced(self) -> None:
        """Free a reduced gradient that has a gradient store, after the update has used it."""
        if self.store is not None:
            self.reduced_S = None
            self.store.free()

    def _allocate(self, dtype: torch.dtype) -> None:
        """Allocate ``grads_N``. Its contents are undefined until slots are filled."""
        unit = self.unit
        self.grads_N = self.comm.allocate(
            unit.layout.full_numel, dtype=dtype, device=unit.full_N.device
        )
        self._views = None
        if self.reducing_N is None and self._reduced_S is None and self.reduced_N is None:
            report_new(self, self.grads_N.untyped_storage().nbytes())
        else:
            self.report()

    def _is_whole(self, grad: Tensor) -> bool:
        """Whether the gradient's memory can be ``grads_N`` of a unit with one parameter, not padded."""
        dtype = self._local_dtype
        if self.grads_N is not None or grad.dtype is not dtype or not grad.is_contiguous():
            return False
        memory = grad.untyped_storage()
        return (
            memory.nbytes() == self._numels[0] * dtype.itemsize
            and storage.uses(memory._cdata) <= 2  # ``a + b.view(...)`` gives both inputs one memory
            and not grad.requires_grad  # else it has a graph, and the program uses it too
            and not grad.is_conj()  # else the memory has other values than the gradient
            and not grad.is_neg()
        )

    def adopt(self, grad: Tensor) -> None:
        """Make the gradient's own memory ``grads_N``. Nothing else may refer to it."""
        self.grads_N, self._views = grad.view(-1), None
        report_new(self, grad.nbytes)

    @property
    def views(self) -> list[Tensor]:
        """Of ``grads_N``, by slot. An adopted gradient that is only reduced needs none."""
        if self._views is None:
            grads_N = self.grads_N
            if grads_N is None:
                return []
            at = grads_N.storage_offset()
            # half the cost of a slice and a view
            self._views = [
                grads_N.as_strided(shape, strides, at + start)
                for shape, strides, start in self._places
            ]
        return self._views

    def slots_of(self, index: int) -> AddendSlots | None:
        """The addends among which slot ``index`` is; None: its gradients are whole."""
        return next((slots for slots in self.addends if index in slots.known), None)

    def begin_backward(self, dtype: torch.dtype) -> None:
        """To be called once per backward, before its first gradient. ``dtype``: of a new local sum."""
        self._local_dtype = dtype
        self.num_ready, self.complete = 0, False
        if self.grads_N is not None and not self.is_unwatched:
            self._lend_slots()

    def end_backward(self) -> None:
        """To be called once per backward, after its last gradient."""
        if self.is_unwatched:
            if self.grads_N is not None:
                self.num_ready = self.grads_N._version - self._version
                return
            for index, param in enumerate(self.unit.params):
                if param.grad is not None:
                    self.take_grad(index, param)
        if self._waiting:
            self.copy_waiting()
        if self._is_lent:
            self._take_back()

    def can_take_at_end(self) -> bool:
        """Whether a first backward needs no hooks: its gradients stay in ``param.grad`` until its end.

        That is where they wait with hooks, too, in a unit of at most :data:`GROUP_NUMEL` elements.
        """
        is_small = self.unit.layout.full_numel <= GROUP_NUMEL
        return is_small and self.grads_N is None and not self._waiting and self._adds_in_place()

    def _adds_in_place(self) -> bool:
        """Whether autograd, adding to ``param.grad``, computes what this buffer would compute."""
        row = self.unit.row
        is_plain = not self._has_dtensors and self.rescale is None
        return self.unit.resident and is_plain and row.param == row.grad_accum

    def lend_all(self) -> bool:
        """Lend all slots, for a backward without hooks. False: that is not possible.

        Views share the version of ``grads_N``, and each addition increments it, so it counts gradients.
        """
        if self.grads_N is None or not all(self.filled):
            return False
        if not all(self._lent):
            self._lend_slots()
        self._version = self.grads_N._version
        return all(self._lent)

    def _lend_slots(self) -> None:
        """Make filled slots the gradients of their parameters, so that autograd itself adds to them.

        A gradient that is there already is not replaced. Only sums in the dtype of the accumulation are
        lent: others are promoted before the next addition.
        """
        assert self.grads_N is not None
        if not self._adds_in_place() or self.grads_N.dtype != self.unit.row.param:
            return
        for index, param in enumerate(self.unit.params):
            if self.filled[index] and index not in self._waiting and param.grad is None:
                param.grad = self.views[index]
                self._lent[index] = self._is_lent = True

    def _take_back(self) -> None:
        """End the loan of slots that got no gradient."""
        for index, param in enumerate(self.unit.params):
            if self._lent[index]:
                param.grad, self._lent[index] = None, False
        self._is_lent = False

    def take_grad(self, index: int, param: nn.Parameter) -> bool:
        """Take the gradient that autograd accumulated into ``param.grad``.

        Returns whether the unit now has all gradients of this backward.

        Raises:
            UnsupportedError: it is sparse.
        """
        grad, param.grad = param.grad, None
        if grad is None:  # a Function returned None for it, or a hook of the program dropped it
            if self._lent[index]:
                self._lent[index] = self.filled[index] = self.has_grad[index] = False
            return False
        if self._lent[index]:
            return self._end_loan(index, grad)
        if self._has_dtensors and type(param) in KINDS:
            slots = self.slots_of(index)
            grad = local_grad(param, grad) if slots is None else slots.local(index, param, grad)
        if grad.is_sparse:
            raise UnsupportedError(
                f"parameter {self.unit.layout.slots[index].fqn!r} has a sparse gradient; ZeRO "
                "reduces dense flat gradients. Use sparse=False in the embedding."
            )
        if self.rescale is not None:
            grad = _product(grad, self.rescale)
        if self.filled[index]:
            self._add(index, grad)
        else:
            self.filled[index] = self.has_grad[index] = True
            if self._is_matrix and self._is_whole(grad):
                self.adopt(grad)
            else:
                self._waiting[index] = grad
                self._waiting_numel += self._numels[index]
        self.num_ready += 1
        is_last = self.num_ready == self._num_params
        if self._waiting and (is_last or self._waiting_numel > self._group_numel):
            self.copy_waiting()
        return is_last

    def _end_loan(self, index: int, grad: Tensor) -> bool:
        """Autograd has added a gradient to a slot. Returns what :meth:`take_grad` does."""
        self._lent[index] = False
        if grad is not self.views[index]:  # with create_graph=True the sum is a new tensor
            self.views[index].copy_(grad.detach())
        self.num_ready += 1
        return self.num_ready == self._num_params

    def _add(self, index: int, grad: Tensor) -> None:
        """Add a second gradient of a parameter to its slot."""
        if self._waiting:
            self.copy_waiting()
        self._promote()
        accumulate(self.views[index], grad)

    def holds_more(self, index: int) -> bool:
        """Whether the slot has a gradient of this step that is not in ``param.grad``."""
        return self.has_grad[index] and not self._lent[index]

    @property
    def waiting_nbytes(self) -> int:
        """Bytes of gradients that are not in ``grads_N`` yet. The ledger does not count them."""
        return sum(grad.nbytes for grad in self._waiting.values())

    def copy_waiting(self) -> None:
        """Copy the gradients that wait into their slots. There must be some."""
        slots, grads, numel = [*self._waiting], [*self._waiting.values()], self._waiting_numel
        self._waiting.clear()
        self._waiting_numel = 0
        if self.grads_N is None:
            self._allocate(self._local_dtype)
        if torch.is_grad_enabled():  # with create_graph=True gradients have a graph
            grads = [grad.detach() for grad in grads]
        self.ledger.count_peak("scratch", numel * grads[0].element_size())
        if self.unit.layout.is_dense and len(grads) == self._num_params:
            assert self.grads_N is not None
            in_order = [grad for _, grad in sorted(zip(slots, grads, strict=True), key=_first)]
            if storage.join_into(self.grads_N, in_order):  # else each slot needs a view
                return
        torch._foreach_copy_([self.views[index] for index in slots], grads)

    def _promote(self) -> None:
        """Convert ``grads_N`` to the accumulation dtype, if a sum was not expected when it was made."""
        assert self.grads_N is not None
        if self.grads_N.dtype != self.unit.row.grad_accum:
            self.grads_N = self.grads_N.to(self.unit.row.grad_accum)
            self._views = None
            self.report()

    def detach_local(self) -> Tensor:
        """Take the local gradient ``[N]``, zeros in slots without one; the buffer is empty afterwards."""
        if self._waiting:
            self.copy_waiting()
        if self._is_lent:  # else a late gradient would be added to memory of the collective
            self._take_back()
        if self.grads_N is None:
            self._allocate(self.unit.row.reduce)
        assert self.grads_N is not None
        if not all(self.filled):
            missing = [
                view for view, filled in zip(self.views, self.filled, strict=True) if not filled
            ]
            torch._foreach_zero_(missing)
        taken, self.grads_N, self._views = self.grads_N, None, None
        self.filled = [False] * len(self.filled)
        return taken

    def begin_reduction(self, grads_N: Tensor, result_S: Tensor) -> None:
        """Note that a reduction of ``grads_N`` into ``result_S`` is in flight, which owns both.

        The caller reports the buffer, here and after :meth:`end_reduction`, with others of the launch.
        """
        self.reducing_N, self.reduce_result_S = grads_N, result_S

    def end_reduction(
        self, grads_N: Tensor, result_S: Tensor, *, widen: bool, whole: bool, complete: bool
    ) -> None:
        """Take over the result of a reduction.

        ``widen``: a sum of several results begins, so convert to the accumulation dtype. ``whole``:
        every rank will need the whole gradient (stage 0), and ``grads_N`` has room for it.
        ``complete``: see :meth:`store_reduced`.
        """
        first = not self.is_reduced
        if not first:
            self.add_reduced(result_S)
        else:
            self.reduced_S = result_S.to(self.unit.row.grad_accum) if widen else result_S
        if whole:
            self.reduced_N = grads_N if first else None
        self.reducing_N = self.reduce_result_S = None
        if self.store is not None:
            self.store_reduced(complete=complete)

    def add_reduced(self, values_S: Tensor) -> None:
        """Add one more reduced gradient of this step."""
        if self.reduced_S is None:
            self.reduced_S = values_S
            return
        if self.reduced_S.dtype != self.unit.row.grad_accum:
            self.reduced_S = self.reduced_S.to(self.unit.row.grad_accum)
        accumulate(self.reduced_S, values_S)

    def change(self, changes: Sequence[GradEdit]) -> None:
        """Do to the gradients what the program did to their ``.grad``."""
        if not changes:
            return
        if any(op in ("mul_", "div_") for _, op, _ in changes):
            self.check_not_offloaded()  # the number is on the device
        reduced_S = self.reduced_S
        sums = [flat for flat in (self.node_sum_P, reduced_S) if flat is not None]
        shard_begin, _ = self.unit.layout.shard_range(self.comm.rank)

        def parts_of(index: int) -> list[Tensor]:
            slot = self.unit.layout.slots[index]
            parts = [self.views[index]] if self.filled[index] else []
            for flat in sums:  # a node part is whole shards
                begin = shard_begin - shard_begin % len(flat)
                low, high = max(begin, slot.start), min(begin + len(flat), slot.stop)
                if low < high:
                    parts.append(flat[low - begin : high - begin])
            return parts

        apply(changes, parts_of)
        for index in [index for index, op, _ in changes if op == DROP]:
            self.filled[index] = self.has_grad[index] = False
        if reduced_S is not None:
            self.store_reduced(complete=True)
            self.report()

    def reset(self) -> None:
        """Drop and free the gradients of this step. The caller reports the buffer."""
        self.stand_ins.hide()
        self.grads_N, self._views, self.node_sum_P = None, None, None
        self._waiting, self._waiting_numel = {}, 0
        if self._is_lent:
            self._take_back()
        self.reducing_N = self.reduce_result_S = self._reduced_S = self.reduced_N = None
        self.is_stored, self.norms = False, None
        if self.store is not None:
            self.store.free()
        self.filled = [False] * len(self.filled)
        self.has_grad = [False] * len(self.has_grad)
        self.num_ready = 0

    def check_not_offloaded(self) -> None:
        """Check that gradients are not offloaded by ``offload_states()``.

        Raises:
            UsageError: they are.
        """
        if self.tier is not Tier.DEVICE:
            raise offloaded_error(f"the gradient of {self.unit.name!r}")

    def held(self) -> list[Tensor]:
        """All gradient memory held here between two backwards, as distinct byte tensors."""
        return distinct(flat for flat in self.flats() if flat is not None)

    def move(self, tier: Tier, carry: Callable[[Tensor], Tensor]) -> None:
        """Move all gradients to ``tier``, unless they are there. ``carry`` copies a byte tensor there."""
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

        for name in ("grads_N", "node_sum_P", "_reduced_S", "reduced_N"):
            setattr(self, name, moved(getattr(self, name)))
        self._views = None
        self.ledger.hold("gradients", self.unit.name, 0, self.tier)
        self.tier = tier
        held_nbytes = sum(here.nbytes for here in held)
        self.ledger.hold("gradients", self.unit.name, held_nbytes, tier)
        self.reported[0] = held_nbytes

    def flats(self) -> tuple[Tensor | None, ...]:
        """See :class:`~zeroshard.zero.grad_ledger.HoldsGrads`."""
        return (
            self.grads_N, self.reducing_N, self.reduce_result_S, self.node_sum_P, self._reduced_S,
            self.reduced_N,
        )  # fmt: skip

    def report(self) -> None:
        """Report to the ledger the bytes held here."""
        report([self])


def _product(grad: Tensor, factor: Tensor) -> Tensor:
    """Their product, rounded once: the factor may be out of the range of fp16."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(wide) * factor).to(grad.dtype)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()
