"""Chooses the updater of each chunk, and what else is done with each optimizer shard in an update.

It is chosen again in two cases. The first: an option of the optimizer that decides whether the fused
update may run has changed, or a hook was added or removed. The second: optimizer state was loaded or
moved, so that prepared fused updates refer to old memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch

from zeroshard.core.ledger import Ledger
from zeroshard.offload.async_update import AsyncUpdateWorker
from zeroshard.optim.fused_update import UpdateKernel
from zeroshard.optim.kernels import deciding_options, kernel_of, steps_chunk_by_chunk
from zeroshard.optim.step_hooks import has_hooks, hook_counts
from zeroshard.zero.choose_updater import WholeStep, choose_updater, overlap_copies
from zeroshard.zero.device_update import DeviceUpdate, Part, may_update
from zeroshard.zero.host_updaters import EarlyHostUpdater
from zeroshard.zero.optimizer_object import OptimizerObject, is_patched
from zeroshard.zero.optimizer_shard import OptimizerShard
from zeroshard.zero.updaters import FusedStep, JointStep, Updater


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
