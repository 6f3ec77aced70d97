"""Chooses the updater of each chunk, and what else is done with each optimizer shard in an update.

A chunk is updated in place, in host memory, on a page, or with all others (:class:`WholeStep`). It is
chosen again in two cases. The first: an option of the optimizer that decides whether the fused update may
run has changed, or a hook was added or removed. The second: optimizer state was loaded or moved, so that
prepared fused updates refer to old memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.offload.async_update import AsyncUpdateWorker, EarlyUpdates, Wait
from zeroshard.offload.stores import has_copy_streams
from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.optim.inner_optimizer import has_hooks, hook_counts
from zeroshard.optim.kernels import deciding_options, kernel_of, steps_chunk_by_chunk
from zeroshard.zero.device_update import DeviceUpdate, Part, may_update
from zeroshard.zero.optimizer_object import OptimizerObject, is_patched
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard
from zeroshard.zero.updaters import (
    AsyncHostUpdater,
    EarlyHostUpdater,
    FusedStep,
    HostUpdater,
    JointStep,
    OwnStep,
    SimulatedStep,
    StepInputs,
    Updater,
)

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
    """One call of the optimizer's ``step`` for all chunks in memory, in the turn of the first one.

    What an optimizer of the program counts for a group or for itself then advances once.
    """

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


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """What is done with one optimizer shard in an update.

    ``loads``: the unit's shard must be read before. ``prefetches``: start reading what the
    next turn needs. ``is_late``: the unit is yielded after the last turn, because its update may run
    asynchronously. ``frees``: free a gradient that has a store. ``early``: begin updates when the
    gradient is complete.
    """

    shard: OptimizerShard
    updaters: tuple[Updater, ...]
    loads: bool
    prefetches: tuple[Callable[[], None], ...]
    is_late: bool
    frees: tuple[Callable[[], None], ...]
    early: tuple[Callable[[], None], ...]


class _Way(NamedTuple):
    """How an optimizer updates: with ``kernel``, or else its own ``step``; ``is_whole``: in one call."""

    kernel: UpdateKernel | None
    is_whole: bool


def _way_of(inner: torch.optim.Optimizer, *, compiles: bool) -> _Way:
    if has_hooks(inner) or is_patched(inner):  # the program sees how often step is called
        return _Way(None, True)
    return _Way(kernel_of(inner, compiles=compiles), not steps_chunk_by_chunk(inner))


def _is_sent(shard: OptimizerShard) -> bool:
    """Whether an all-gather or a write to disk follows the update, and runs beside the next one."""
    unit = shard.unit
    is_gathered = unit.resident and unit.comm.size > 1 and not shard.is_whole
    return is_gathered or unit.store.tier.only_in_use


class Turns:
    """The turns of an update, one for each shard in the order of forward.

    ``one_step``: makes the context of an update, in which several calls of the optimizer's ``step``
    count as one, if there are several. ``compiles``: a fused update may be compiled. ``worker``: for
    chunks that are updated in another memory than the device's.
    """

    def __init__(
        self,
        optimizer: OptimizerObject,
        shards: Sequence[OptimizerShard],
        *,
        ledger: Ledger,
        worker: AsyncUpdateWorker | None,
        compiles: bool,
    ) -> None:
        self.one_step: Callable[[], AbstractContextManager[None]] = nullcontext
        self._optimizer = optimizer
        self._shards = shards
        self._ledger = ledger
        self._worker = worker
        self._compiles = compiles
        self._early = None if worker is None else worker.early
        self._deciding_options = deciding_options(optimizer.inner)
        self._decided_on: list[object] = []  # the options for which the turns were chosen
        self._way: _Way | None = None
        self._turns: list[Turn] = []
        self._device_updates: dict[int, DeviceUpdate] = {}
        self.choose()

    def begin_early(self, at: int) -> None:
        """Begin updates of a shard, by its index, whose gradient is on its way to host memory."""
        for begin in self.current()[at].early:
            begin()

    def current(self) -> list[Turn]:
        """The turns for the optimizer's options as they are now."""
        if self._options() != self._decided_on:
            self.choose()
        return self._turns

    def _options(self) -> list[object]:
        """What decides how ``step`` is called: options of the groups, numbers of hooks, another step."""
        inner = self._optimizer.inner
        return [
            hook_counts(inner),
            vars(inner).get("step"),
            *(group.get(name) for name in self._deciding_options for group in inner.param_groups),
        ]

    def choose(self, *, anew: bool = False) -> None:
        """Choose the updater of each chunk. Without ``anew``, only if the way to update has changed."""
        self._decided_on = self._options()
        way = _way_of(self._optimizer.inner, compiles=self._compiles)
        if way == self._way and not anew:
            return
        self._way = way
        if self._early is not None:
            self._early.withdraw()  # the new updaters do not know them
        all_at_once = all(s.is_in_memory(chunk) for s in self._shards for chunk in s.chunks)
        several = way.is_whole and not all_at_once
        self.one_step = self._optimizer.several if several else nullcontext
        self._choose_device_updates(way.kernel)
        whole = WholeStep(self._optimizer) if way.is_whole else None
        chosen = [self._updaters(shard, way.kernel, whole) for shard in self._shards]
        self._join(chosen)
        self._turns = [
            self._turn(shard, following, updaters)
            for (shard, following), updaters in zip(
                zip_longest(self._shards, self._shards[1:]), chosen, strict=True
            )
        ]
        overlap_copies(updater for turn in self._turns for updater in turn.updaters)

    def _updaters(
        self, shard: OptimizerShard, kernel: UpdateKernel | None, whole: WholeStep | None
    ) -> list[Updater]:
        on_device = self._device_updates.get(id(shard))
        early = self._early if self._early and shard.unit.name in self._early.units else None
        updaters: list[Updater] = [] if on_device is None else [on_device]
        return updaters + [
            choose_updater(
                shard,
                chunk,
                kernel,
                self._optimizer,
                ledger=self._ledger,
                worker=self._worker,
                whole=whole,
                early=early,
            )
            for chunk in shard.chunks
            if not may_update(chunk, kernel)
        ]

    def _join(self, chosen: Sequence[Sequence[Updater]]) -> None:
        """Let all fused steps after which nothing is sent be made at once."""
        steps = [
            updater
            for shard, updaters in zip(self._shards, chosen, strict=True)
            if not _is_sent(shard)
            for updater in updaters
            if isinstance(updater, FusedStep)
        ]
        if len(steps) > 1:
            JointStep(self._optimizer, steps)

    def _turn(
        self,
        shard: OptimizerShard,
        following: OptimizerShard | None,
        updaters: Sequence[Updater],
    ) -> Turn:
        only_in_use = shard.unit.store.tier.only_in_use
        return Turn(
            shard,
            tuple(updaters),
            loads=only_in_use,
            prefetches=() if following is None else following.prefetches(),
            is_late=self._worker is not None and not only_in_use,
            frees=() if shard.buffer.store is None else (shard.buffer.discard_reduced,),
            early=tuple(u.begin_early for u in updaters if isinstance(u, EarlyHostUpdater)),
        )

    def _choose_device_updates(self, kernel: UpdateKernel | None) -> None:
        """Choose, by ``id(shard)``, the updates in device memory that run in the shard's turn.

        One of them updates all units that are not all-gathered afterwards, in the first one's turn.
        """
        for update in self._device_updates.values():
            update.close()
        at_once: list[Part] = []
        chosen: list[tuple[str, list[Part]]] = [("all units", at_once)]
        for shard in self._shards:
            parts = [(shard, chunk) for chunk in shard.chunks if may_update(chunk, kernel)]
            if _is_sent(shard):
                chosen.append((shard.unit.name, parts))
            else:
                at_once += parts
        self._device_updates = {
            id(parts[0][0]): DeviceUpdate(parts, kernel, self._optimizer, self._ledger, name=name)
            for name, parts in chosen
            if kernel is not None and parts
        }

    def close(self) -> None:
        """Free the tables of the updates in device memory, and hold the shards no longer."""
        for update in self._device_updates.values():
            update.close()
        self._shards, self._turns, self._device_updates = (), [], {}
