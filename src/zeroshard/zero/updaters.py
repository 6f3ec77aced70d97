"""Updates one chunk: where it is stored, or in host memory for a parameter on another device.

The sharded optimizer chooses an :class:`Updater` for each chunk when the engine is built
(:mod:`zeroshard.zero.turns`), and calls its ``step`` in each step.

There are two ways to compute an update, with the same bits (ADR 0007). :class:`OwnStep` calls ``step`` of
the optimizer object. :class:`FusedStep` makes one pass over memory, :class:`JointStep` one over several
chunks. :class:`SimulatedStep` stands for a kernel where tensors are fake.

:class:`HostUpdater` uses both ways. The gradient is copied from the device and the parameter back. Where
the chunk's memory stays valid, the worker thread makes the fused pass: in the step or, if that is likely
to be right, before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.memory.storage import real_view
from zeroshard.offload.async_update import AsyncUpdateWorker, EarlyUpdates, Wait
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.optim.fused_update import FusedUpdate, JointUpdate, UpdateKernel
from zeroshard.zero.optimizer_object import OptimizerObject
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, opened

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page

NO_SLOTS: frozenset[int] = frozenset()
"""No slot is left out of the step."""

_NO_STATE: dict[str, Tensor] = {}


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What the updaters of one optimizer step share.

    ``factor``: 0-dim, multiplies every gradient. ``found_inf``: 0-dim, 1 if nothing may change; None if
    the step is known to be applied. ``untouched``: by ``id(unit)``, the slots to which no rank gave a
    gradient. ``pages``: opens the next chunk's page.
    """

    factor: Tensor
    found_inf: Tensor | None
    untouched: Mapping[int, frozenset[int]]
    pages: Iterator[Page]

    @cached_property
    def factor_on_host(self) -> float:
        """``factor`` as a number. Waits for its device, if that is not the host."""
        return float(self.factor)


class Updater(Protocol):
    """How one chunk is updated."""

    def step(self, inputs: StepInputs) -> Wait | None:
        """Update the chunk, or start its update. The unit's shard must be readable.

        Returns a function that waits until the updated parameter is on the device; None: it is there.
        """


class OwnStep:
    """In place, with the optimizer's own ``step`` on the chunk's fragments."""

    def __init__(
        self,
        shard: OptimizerShard,
        chunk: OptimizerChunk,
        optimizer: OptimizerObject,
        ledger: Ledger,
    ) -> None:
        self._shard = shard
        self._chunk = chunk
        self._optimizer = optimizer
        self._ledger = ledger

    def step(self, inputs: StepInputs) -> None:
        """See :class:`Updater`."""
        grad_C, skipped = self.receive(inputs)
        self.run(grad_C, inputs.factor, skipped, inputs.found_inf)

    def receive(self, inputs: StepInputs) -> tuple[Tensor, frozenset[int]]:
        """Take over edits. Returns the gradient ``[C]``, and the slots that are left out."""
        shard = self._shard
        self._chunk.sync_from_param()
        return shard.gradient_of(self._chunk), inputs.untouched.get(id(shard.unit), NO_SLOTS)

    def run(
        self,
        grad_C: Tensor,
        factor: Tensor,
        skipped: frozenset[int],
        found_inf: Tensor | None = None,
    ) -> None:
        """Update with ``grad_C * factor``. May overwrite ``grad_C``. ``skipped``: slots left out."""
        with ExitStack() as during:
            self.give(grad_C, factor, skipped, during)
            members: list[list[Tensor]] = [[] for _ in self._optimizer.inner.param_groups]
            for fragment in self._chunk.fragments:
                if fragment.index not in skipped:
                    members[fragment.group].append(fragment.value)
            if any(members):
                self._optimizer.step(found_inf, members)
                self.take()

    def give(
        self, grad_C: Tensor, factor: Tensor, skipped: frozenset[int], during: ExitStack
    ) -> None:
        """Set ``.grad`` of the fragments that take part to ``grad_C * factor``, until ``during`` ends.

        That of the others is None: a step that lists all fragments leaves out those without a gradient.
        """
        chunk, dtype = self._chunk, self._chunk.master_C.dtype
        if grad_C.dtype != dtype:
            during.enter_context(self._ledger.lend("update", chunk.master_C.nbytes))
            grad_C = grad_C.to(dtype)
        values = real_view(grad_C)
        values.mul_(factor.to(values.dtype))
        during.enter_context(opened(chunk.fragments))
        for fragment in chunk.fragments:
            takes_part = fragment.index not in skipped
            fragment.value.grad = fragment.of(grad_C) if takes_part else None

    def take(self) -> None:
        """After ``step`` of the optimizer: move new state, and round the masters."""
        chunk = self._chunk
        chunk.adopt_state(self._optimizer.inner.state)
        chunk.round_master_into_param()
        self._shard.has_new_state = True


class FusedStep:
    """In place, in one pass over memory. The optimizer's own step runs where that is not possible.

    The pass is not possible in the first step, in which the optimizer makes its state, in a step that
    leaves out slots, and while it is not known whether the step is skipped. The pass is prepared once. It
    is prepared again if the state is in other tensors.
    """

    def __init__(
        self,
        shard: OptimizerShard,
        chunk: OptimizerChunk,
        kernel: UpdateKernel,
        own: OwnStep,
        optimizer: OptimizerObject,
        ledger: Ledger,
    ) -> None:
        self._shard = shard
        self._chunk = chunk
        self._kernel = kernel
        self._own = own
        self._inner = optimizer.inner
        self._ledger = ledger
        self.joint: JointStep | None = None
        self._fused: FusedUpdate | None = None
        # What the optimizer's state of each fragment was: name and tensor.
        self._known: list[tuple[Tensor, list[tuple[str, Tensor]]]] = []

    def step(self, inputs: StepInputs) -> None:
        """See :class:`Updater`."""
        if self.joint is not None and self.joint.did(inputs):
            return
        shard = self._shard
        skipped = inputs.untouched.get(id(shard.unit), NO_SLOTS)
        fused = self.prepared() if not skipped and inputs.found_inf is None else None
        if fused is None:
            self._own.step(inputs)
        else:
            fused.run(self.gradient(), inputs.factor_on_host, self._inner.param_groups)

    def gradient(self) -> Tensor:
        """See :meth:`OptimizerShard.gradient_of`."""
        return self._shard.gradient_of(self._chunk)

    def prepared(self) -> FusedUpdate | None:
        """The prepared pass; None if the optimizer has not made its state."""
        state = self._inner.state
        if self._fused is not None:
            for value, known in self._known:
                here = dict.get(state, value, _NO_STATE)  # a program's get() has an error
                for name, tensor in known:
                    if here.get(name) is not tensor:
                        return self._prepare()  # loading optimizer state replaces its tensors
            return self._fused
        return self._prepare()

    def _prepare(self) -> FusedUpdate | None:
        kernel, chunk, state = self._kernel, self._chunk, self._inner.state
        if kernel.compiled is not None:
            kernel.compiled()  # starts compiling
        chunk.adopt_state(state)
        # Not through a program's get(), which has an error and settles early updates.
        states = [dict.get(state, fragment.value) or {} for fragment in chunk.fragments]
        if not all(kernel.is_in(found) for found in states):
            return None
        self._known = [
            (fragment.value, [(name, found[name]) for name in kernel.names])
            for fragment, found in zip(chunk.fragments, states, strict=True)
        ]
        # On the host the pass may run on the worker thread, which reports nothing to the ledger.
        on_host = chunk.host_chunk is not None
        with opened(chunk.fragments):
            self._fused = FusedUpdate(
                kernel,
                [(fragment.group, fragment.at, fragment.value) for fragment in chunk.fragments],
                states,
                master_R=chunk.master_C,
                param_R=chunk.param_on_update_device,
                **({} if on_host else {"lend": partial(self._ledger.lend, "update")}),
            )
        return self._fused


class JointStep:
    """Fused steps of several chunks that can be updated at once, in one call in the turn of the first.

    Where the call is not possible, each chunk is updated in its own turn.
    """

    def __init__(self, optimizer: OptimizerObject, steps: Sequence[FusedStep]) -> None:
        self._inner = optimizer.inner
        self._steps = list(steps)
        self._joint: JointUpdate | None = None
        self._inputs: StepInputs | None = None  # for which :meth:`did` was asked last
        self._did = False
        for step in steps:
            step.joint = self

    def did(self, inputs: StepInputs) -> bool:
        """Whether all chunks are updated. Updates them if that is possible."""
        if self._inputs is not inputs:
            self._inputs, self._did = inputs, self._run(inputs)
        return self._did

    def _run(self, inputs: StepInputs) -> bool:
        if inputs.untouched or inputs.found_inf is not None:
            return False
        prepared = [step.prepared() for step in self._steps]
        updates = [update for update in prepared if update is not None]
        if len(updates) < len(prepared):
            return False
        if self._joint is None or self._joint.updates != updates:
            self._joint = JointUpdate(updates)
        grads = [step.gradient() for step in self._steps]
        self._joint.run(grads, inputs.factor_on_host, self._inner.param_groups)
        return True


class SimulatedStep:
    """Of fake tensors: a kernel allocates nothing, after the optimizer's own step has made the state."""

    def __init__(
        self, chunk: OptimizerChunk, kernel: UpdateKernel, own: OwnStep, optimizer: OptimizerObject
    ) -> None:
        self._chunk = chunk
        self._kernel = kernel
        self._own = own
        self._inner = optimizer.inner

    def step(self, inputs: StepInputs) -> None:
        """See :class:`Updater`."""
        state = self._inner.state
        has_state = all(self._kernel.is_in(state.get(f.value, {})) for f in self._chunk.fragments)
        if not has_state or inputs.found_inf is not None:
            self._own.step(inputs)


class HostUpdater:
    """In host memory, on this thread.

    For chunks whose memory is valid only during the call, and for optimizers without a kernel.
    """

    def __init__(
        self,
        shard: OptimizerShard,
        chunk: OptimizerChunk,
        host_chunk: HostChunk,
        own: OwnStep,
        fused: FusedStep | None,
        optimizer: OptimizerObject,
        worker: AsyncUpdateWorker,
    ) -> None:
        self.following: HostUpdater | None = None  # its copies begin before this chunk is updated
        self._shard = shard
        self._chunk = chunk
        self._host_chunk = host_chunk
        self._own = own
        self._fused = fused
        self._inner = optimizer.inner
        self._worker = worker
        self._begun: tuple[StepInputs, HostGradTransfer] | None = None

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        return self._update(transfer, skipped, self._prepared(skipped))

    def begin(self, inputs: StepInputs) -> HostGradTransfer:
        """Start copying the gradient, unless that was started in backward, and the step's numbers."""
        if self._begun is not None and self._begun[0] is inputs:
            return self._begun[1]
        shard, host_chunk = self._shard, self._host_chunk
        if not shard.buffer.is_stored:
            host_chunk.send_gradient(shard.gradient_of(self._chunk))
        transfer = host_chunk.transfer(inputs, inputs.factor, inputs.found_inf)
        self._begun = inputs, transfer
        return transfer

    def sent(self, inputs: StepInputs) -> tuple[HostGradTransfer, frozenset[int]]:
        """Start the copies of this chunk and of the following one."""
        transfer = self.begin(inputs)
        if self.following is not None:
            self.following.begin(inputs)
        self._begun = None
        return transfer, inputs.untouched.get(id(self._shard.unit), NO_SLOTS)

    def _prepared(self, skipped: frozenset[int]) -> FusedUpdate | None:
        return None if skipped or self._fused is None else self._fused.prepared()

    def _update(
        self, transfer: HostGradTransfer, skipped: frozenset[int], fused: FusedUpdate | None
    ) -> Wait:
        if fused is not None:
            self._worker.update(fused, self._host_chunk, transfer, self._inner.param_groups)
        else:
            factor = self.receive(transfer)
            if factor is not None:
                self._own.run(transfer.grad_C, factor, skipped)
        return self.send()

    def receive(self, transfer: HostGradTransfer) -> Tensor | None:
        """Wait for the gradient, and take over edits. Returns its factor; None: the step is skipped."""
        transfer.wait()
        if transfer.is_edited:
            self._host_chunk.copy_param_from_device()
        self._chunk.sync_from_param()
        if transfer.numbers.is_skipped:
            return None
        return torch.tensor(transfer.numbers.factor, dtype=torch.float64)

    def send(self) -> Wait:
        """Let the parameter be copied to the device. Returns what waits for it."""
        host_chunk = self._host_chunk
        if self._chunk.page is None:
            return lambda: host_chunk.wait_for_param(host_chunk.send_param())
        # Started now: the chunk after the following one uses the same memory.
        arrival = host_chunk.send_param()
        return lambda: host_chunk.wait_for_param(arrival)


class AsyncHostUpdater(HostUpdater):
    """In host memory, on the worker thread if the fused pass is prepared, else on this thread."""

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        fused = self._prepared(skipped)
        if fused is None:
            return self._update(transfer, skipped, fused)
        return self._worker.submit(fused, self._host_chunk, transfer, self._inner.param_groups)


class EarlyHostUpdater(AsyncHostUpdater):
    """In host memory, and begun before the step if that is likely to be right.

    See [Note: early updates] in :mod:`zeroshard.offload.async_update`.
    """

    def __init__(self, *args: Any, early: EarlyUpdates) -> None:
        super().__init__(*args)
        self._early = early

    def begin_early(self) -> None:
        """Start the update, after the gradient was sent. None before the optimizer has made its state."""
        fused = self._prepared(NO_SLOTS)
        if fused is not None:
            self._early.begin(self._host_chunk, fused, self._inner.param_groups)

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        transfer, skipped = self.sent(inputs)
        fused, groups = self._prepared(skipped), self._inner.param_groups
        early = self._early.take(self._host_chunk, fused, groups)
        if fused is None:
            return self._update(transfer, skipped, fused)
        return self._worker.submit(fused, self._host_chunk, transfer, groups, early)
