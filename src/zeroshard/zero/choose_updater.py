"""Chooses how each chunk is updated: in place, in host memory, on a page, or with all others.

:class:`WholeStep` calls ``step`` of the optimizer once for all chunks that are in memory: what an
optimizer of the program counts for a group or for itself then advances once. :class:`PagedUpdater` opens
the chunk's page and runs any other updater.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.offload.async_update import AsyncUpdateWorker, Wait
from zeroshard.offload.early_update import EarlyUpdates
from zeroshard.offload.stores import has_copy_streams
from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.zero.host_updaters import AsyncHostUpdater, EarlyHostUpdater, HostUpdater
from zeroshard.zero.optimizer_object import OptimizerObject
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard
from zeroshard.zero.updaters import FusedStep, OwnStep, SimulatedStep, StepInputs, Updater

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page


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
