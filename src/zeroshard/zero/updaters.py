"""Updates one chunk: in place, in host memory, or on a page of the pager.

The sharded optimizer chooses an :class:`Updater` for each chunk (:func:`choose_updater`) when the engine
is built, and calls its ``step`` in each step.

There are two ways to compute an update, with the same bits (ADR 0007). :class:`OwnStep` calls ``step`` of
the optimizer object. :class:`FusedStep` makes one pass over memory. Both work where the chunk is stored.
:class:`WholeStep` calls ``step`` once for all chunks that are in memory: what an optimizer of the program
counts for a group or for itself then advances once.
:class:`HostUpdater` and :class:`AsyncHostUpdater` copy the gradient from the device, run one of the two,
and copy the parameter back; :class:`EarlyHostUpdater` begins in backward. :class:`PagedUpdater` opens the
chunk's page and runs any other updater. :class:`SimulatedStep` stands for a kernel where tensors are
fake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.memory.storage import real_view
from zeroshard.offload.async_update import AsyncUpdateWorker, Wait
from zeroshard.offload.early_update import EarlyUpdates
from zeroshard.offload.host_chunk import HostChunk, HostGradTransfer
from zeroshard.offload.stores import has_copy_streams
from zeroshard.optim.fused_update import FusedUpdate, UpdateKernel
from zeroshard.zero.optimizer_object import OptimizerObject
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, opened

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page

_NO_SLOTS: frozenset[int] = frozenset()


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
        return shard.gradient_of(self._chunk), inputs.untouched.get(id(shard.unit), _NO_SLOTS)

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
        """Set ``.grad`` of the fragments that take part to ``grad_C * factor``, until ``during`` ends."""
        chunk, dtype = self._chunk, self._chunk.master_C.dtype
        if grad_C.dtype != dtype:
            during.enter_context(self._ledger.lend("update", chunk.master_C.nbytes))
            grad_C = grad_C.to(dtype)
        values = real_view(grad_C)
        values.mul_(factor.to(values.dtype))
        during.enter_context(opened(chunk.fragments))
        for fragment in chunk.fragments:
            if fragment.index not in skipped:
                fragment.value.grad = fragment.of(grad_C)

    def take(self) -> None:
        """After ``step`` of the optimizer: move new state, and round the masters."""
        chunk = self._chunk
        chunk.adopt_state(self._optimizer.inner.state)
        chunk.round_master_into_param()
        self._shard.has_new_state = True


class WholeStep:
    """One call of the optimizer's ``step`` for all chunks in memory, in the turn of the first one."""

    def __init__(self, optimizer: OptimizerObject) -> None:
        self._optimizer = optimizer
        self._parts: list[PartOfStep] = []
        self._done: StepInputs | None = None

    def part(self, own: OwnStep, host: HostUpdater | None) -> PartOfStep:
        """The updater of one more chunk."""
        self._parts.append(PartOfStep(self, own, host))
        return self._parts[-1]

    def run(self, inputs: StepInputs) -> None:
        """Update all chunks, unless it was done in this step."""
        if self._done is inputs:
            return
        self._done = inputs
        for part in self._parts:
            if part.host is not None:
                part.host.begin(inputs)
        with ExitStack() as during:
            given = [part.give(inputs, during) for part in self._parts]
            if all(given):
                on_host = all(part.host is not None for part in self._parts)
                self._optimizer.step(None if on_host else inputs.found_inf)
                for part in self._parts:
                    part.own.take()
        for part in self._parts:
            part.wait = None if part.host is None else part.host.send()


class PartOfStep:
    """The updater of a chunk whose update is part of a :class:`WholeStep`. ``host``: in host memory."""

    def __init__(self, whole: WholeStep, own: OwnStep, host: HostUpdater | None) -> None:
        self.own = own
        self.host = host
        self.wait: Wait | None = None
        self._whole = whole

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        self._whole.run(inputs)
        return self.wait

    def give(self, inputs: StepInputs, during: ExitStack) -> bool:
        """Give the fragments their gradients. Returns whether the step is applied, as far as known."""
        if self.host is None:
            grad_C, skipped = self.own.receive(inputs)
            self.own.give(grad_C, inputs.factor, skipped, during)
            return True
        transfer, skipped = self.host.sent(inputs)
        factor = self.host.receive(transfer)
        if factor is not None:
            self.own.give(transfer.grad_C, factor, skipped, during)
        return factor is not None


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
        self._names = (*kernel.shaped, "step") if kernel.counts else kernel.shaped
        self._fused: FusedUpdate | None = None
        self._known: list[tuple[Tensor, str, Tensor]] = []  # fragment, name and tensor of its state

    def step(self, inputs: StepInputs) -> None:
        """See :class:`Updater`."""
        shard = self._shard
        skipped = inputs.untouched.get(id(shard.unit), _NO_SLOTS)
        fused = self.prepared() if not skipped and inputs.found_inf is None else None
        if fused is None:
            self._own.step(inputs)
        else:
            grad_C = shard.gradient_of(self._chunk)
            fused.run(grad_C, inputs.factor_on_host, self._inner.param_groups)

    def prepared(self) -> FusedUpdate | None:
        """The prepared pass; None if the optimizer has not made its state."""
        state = self._inner.state
        if self._fused is not None:
            for value, name, tensor in self._known:
                here = dict.get(state, value)  # a program's get() has an error
                if here is None or here.get(name) is not tensor:
                    break  # loading optimizer state replaces its tensors
            else:
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
            (fragment.value, name, found[name])
            for fragment, found in zip(chunk.fragments, states, strict=True)
            for name in self._names
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
        return transfer, inputs.untouched.get(id(self._shard.unit), _NO_SLOTS)

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

    See [Note: early updates] in :mod:`zeroshard.offload.early_update`.
    """

    def __init__(self, *args: Any, early: EarlyUpdates) -> None:
        super().__init__(*args)
        self._early = early

    def begin_early(self) -> None:
        """Start the update, after the gradient was sent. None before the optimizer has made its state."""
        fused = self._prepared(_NO_SLOTS)
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


class PagedUpdater:
    """Any updater, on a chunk whose master and state are on disk."""

    def __init__(self, page: Page, updater: Updater) -> None:
        self._page = page
        self.updater = updater

    def step(self, inputs: StepInputs) -> Wait | None:
        """See :class:`Updater`."""
        page = next(inputs.pages)
        assert page is self._page, "pages are opened in the order of the chunks"
        wait = self.updater.step(inputs)
        page.filled_nbytes = page.nbytes
        return wait


def choose_updater(
    shard: OptimizerShard,
    chunk: OptimizerChunk,
    kernel: UpdateKernel | None,
    optimizer: OptimizerObject,
    *,
    ledger: Ledger,
    worker: AsyncUpdateWorker | None,
    whole: WholeStep | None = None,
    early: EarlyUpdates | None = None,
) -> Updater:
    """The updater of one chunk. ``kernel``: None if the optimizer's own step has to run.

    A fused pass runs on the CPU only. ``worker`` is needed for chunks with a host chunk. ``whole``: the
    one call for all chunks in memory, if the optimizer needs it; without ``kernel`` only. ``early``: the
    update may begin before the step.
    """
    own = OwnStep(shard, chunk, optimizer, ledger)
    updater = _in_place(shard, chunk, kernel, own, optimizer, ledger)
    if chunk.host_chunk is not None:
        assert worker is not None
        stays = chunk.page is None and not shard.unit.store.tier.only_in_use
        kind: Callable[..., HostUpdater] = AsyncHostUpdater if stays else HostUpdater
        fused = updater if isinstance(updater, FusedStep) else None
        if early is not None and fused is not None:
            kind = partial(EarlyHostUpdater, early=early)
        updater = kind(shard, chunk, chunk.host_chunk, own, fused, optimizer, worker)
    if whole is not None and shard.is_in_memory(chunk):
        return whole.part(own, updater if isinstance(updater, HostUpdater) else None)
    return updater if chunk.page is None else PagedUpdater(chunk.page, updater)


def _in_place(
    shard: OptimizerShard,
    chunk: OptimizerChunk,
    kernel: UpdateKernel | None,
    own: OwnStep,
    optimizer: OptimizerObject,
    ledger: Ledger,
) -> Updater:
    """The updater for a chunk where it is stored."""
    master_C = chunk.master_C
    if kernel is None:
        return own
    if not isinstance(master_C, FakeTensor):
        on_cpu = master_C.device.type == "cpu"
        return FusedStep(shard, chunk, kernel, own, optimizer, ledger) if on_cpu else own
    # On a CPU the first step is the optimizer's own and may cast the gradient: that is the peak.
    casts = shard.unit.row.reduce != master_C.dtype
    plain = kernel.device_form is not None and chunk.page is None
    if plain and (not casts or has_copy_streams(master_C.device)):
        return SimulatedStep(chunk, kernel, own, optimizer)
    return own


def overlap_copies(updaters: Iterable[Updater]) -> None:
    """Let each update in host memory begin the copies of the next one. ``updaters``: in their order."""
    plain = (u.updater if isinstance(u, PagedUpdater) else u for u in updaters)
    for updater, following in pairwise(u for u in plain if isinstance(u, HostUpdater)):
        updater.following = following
