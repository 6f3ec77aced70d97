"""Opens the tiers that an engine uses, and makes buffers for updates in host memory.

They follow the plan of :mod:`zeroshard.offload.offload_plan`.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.env import RankInfo
from zeroshard.config import Config
from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.device.choice import choose_device, memory_nbytes, ops_of
from zeroshard.device.copy_streams import CopyStreams, CudaCopyStreams
from zeroshard.device.pinned import HostArena, cores, slot_nbytes
from zeroshard.memory.host_memory import return_large_blocks
from zeroshard.memory.storage import WEIGHTS_NBYTES, WEIGHTS_OWNER, weights_for
from zeroshard.offload.async_update import AsyncUpdateWorker, EarlyUpdates
from zeroshard.offload.grad_store import GradStore, PlannedGradStore
from zeroshard.offload.host_chunk import HostStaging
from zeroshard.offload.offload_plan import (
    OffloadPlan,
    grad_itemsize,
    host_sizes,
    old_state_nbytes,
    page_sizes,
    shared_nbytes,
)
from zeroshard.offload.pager import Pager, TransferTimes
from zeroshard.offload.swap_file import SwapFile
from zeroshard.offload.tier_stores import ChunkMemory, FakeStores, TierOpening, TierStores
from zeroshard.optim.fused_update import threads_for
from zeroshard.optim.probe import Probe

_COPY_BUFFERS = "copy buffers of host chunks"
_OLD_STATE = "state before early updates"

PATIENCE_S = 10.0
"""How long copies are waited for after an error. They take less than a second unless a rank is lost."""


def has_copy_streams(device: torch.device) -> bool:
    """Whether host memory differs from the device's memory."""
    return ops_of(device).is_async or memory_nbytes(device) > 0


def make_copy_streams(device: torch.device, *, copies: bool) -> CopyStreams | None:
    """Copies between ``device`` and host memory. None if they are one memory, unless ``copies``."""
    if ops_of(device).is_async:
        return CudaCopyStreams(device)
    return CopyStreams() if copies else None


class Stores:
    """What stores the state of one engine on this rank. Tiers are opened at their first use."""

    def __init__(
        self, config: Config, ledger: Ledger, offload_plan: OffloadPlan, device: torch.device
    ) -> None:
        zero = config.zero_optimization
        section = zero.offload_optimizer
        is_fake = isinstance(torch.empty(0), FakeTensor)
        self._offload_plan = offload_plan
        self._is_delayed = section is not None and section.delayed_update
        self.streams: CopyStreams | None = None
        if offload_plan.is_offloaded and not is_fake:
            self.streams = make_copy_streams(device, copies=self._is_delayed)
        self._opening = TierOpening(
            Tier.DEVICE,
            device,
            ledger,
            section,
            zero.offload_param,
            self.streams,
            is_planned=is_fake,
        )
        self._opened: dict[Tier, TierStores] = {}
        self._pager: Pager | None = None
        self._arenas: list[HostArena] = []
        self._copy_buffers: Tensor | None = None  # in a plan for a GPU
        in_file = any(tier.only_in_use for tier in offload_plan.params.values())
        has_copies = offload_plan.is_offloaded and has_copy_streams(device)
        if self.streams is not None or in_file or has_copies:
            ledger.hold("scratch", WEIGHTS_OWNER, WEIGHTS_NBYTES)
            self._weights = weights_for(torch.empty(0, device=device))
        if device.type == "cpu" and (offload_plan.grads or in_file):
            return_large_blocks(offloaded=True)  # from here on, since construction needs memory too

    def stores_of(self, tier: Tier) -> TierStores:
        """The stores of one tier."""
        if tier not in self._opened:
            kind: Callable[[TierOpening], TierStores] = FakeStores
            if not self._opening.is_planned or tier is Tier.DEVICE or tier.only_in_use:
                module, _, name = tier.made_by.partition(":")
                kind = getattr(importlib.import_module(module), name)
            self._opened[tier] = kind(replace(self._opening, tier=tier))
        return self._opened[tier]

    def stores_of_unit(self, unit: str) -> TierStores:
        """The stores of the tier of a unit's parameters."""
        return self.stores_of(self._offload_plan.tier_of(unit))

    def grad_store_of(self, unit: str, nbytes: int) -> GradStore | None:
        """The store for the unit's reduced gradient of ``nbytes``; None: it stays in its buffer.

        On a GPU, a gradient that is used in host memory gets its store when the optimizer is built.
        """
        if self._opening.is_planned and unit in self._offload_plan.sent:
            return PlannedGradStore(self._planned_copy_buffers)
        tier = self._offload_plan.grads.get(unit)
        return None if tier is None else self.stores_of(tier).grad_store(unit, nbytes)

    def pager(self, found: Mapping[torch.dtype, Probe]) -> Pager | None:
        """The ring for pages of optimizer state; None if there are none."""
        sizes = list(page_sizes(self._offload_plan, found))
        if any(nbytes for _, nbytes in sizes):
            pages_nbytes = [nbytes for _, nbytes in sizes]
            self._pager = self.stores_of(sizes[0][0]).open_pager(pages_nbytes)
        return self._pager

    def chunk_memory(
        self, tier: Tier, numel: int, dtypes: Mapping[str, torch.dtype]
    ) -> ChunkMemory | None:
        """See :meth:`TierStores.chunk_memory`."""
        return self.stores_of(tier).chunk_memory(numel, dtypes)

    def host_updates(
        self, found: Mapping[torch.dtype, Probe], rank_info: RankInfo
    ) -> tuple[HostStaging | None, AsyncUpdateWorker | None]:
        """What copies and updates chunks in host memory; None if they need no copies.

        On CPU ranks only the delayed update needs them: forward may not read what an update is writing.
        The worker begins updates before the step, if the plan says so. It may use this rank's share of
        the cores on a GPU host, and torch's number of threads on CPU ranks, where the same cores compute
        forward and backward.
        """
        plan, streams = self._offload_plan, self.streams
        if plan.early:
            self._hold(_OLD_STATE, old_state_nbytes(plan, found))
        if streams is None or not plan.is_updated_off_device:
            return None, None
        nbytes = self._host_nbytes()
        self._hold(_COPY_BUFFERS, nbytes["scratch"])
        section, device = self._opening.optimizer, self._opening.device
        arena = HostArena(sum(nbytes.values()), section is not None and section.pin_memory)
        self._arenas.append(arena)
        host = HostStaging(
            streams,
            arena.take,
            self._opening.watched,
            grad_itemsize=grad_itemsize(plan),
            shared_nbytes=shared_nbytes(plan),
        )
        threads = torch.get_num_threads()
        if device.type != "cpu":
            threads = threads_for(sys.maxsize, cores(), rank_info.local_world_size, threads)
        worker = AsyncUpdateWorker(device, threads=threads, delayed=self._is_delayed)
        if plan.early:
            factor_1 = host.allocate(1, torch.float64)
            worker.early = EarlyUpdates(worker, plan.early, streams, factor_1)
        return host, worker

    def _hold(self, owner: str, nbytes: int) -> None:
        self._opening.ledger.hold("scratch", owner, nbytes, Tier.HOST)

    def _host_nbytes(self) -> dict[str, int]:
        """Bytes of pinned memory for the update in host memory, by category of the ledger."""
        nbytes = dict.fromkeys(("master", "scratch"), 0)
        for category, numel, dtype in host_sizes(self._offload_plan):
            nbytes[category] += slot_nbytes(numel, dtype)
        return nbytes

    def _planned_copy_buffers(self) -> Tensor:
        """The copy buffers of a plan for a GPU, uint8 and fake, from their first use on."""
        if self._copy_buffers is None:
            nbytes = self._host_nbytes()["scratch"]
            self._hold(_COPY_BUFFERS, nbytes)
            self._copy_buffers = torch.empty(nbytes, dtype=torch.uint8)
        return self._copy_buffers

    @property
    def uses_disk(self) -> bool:
        """Whether anything is stored on disk."""
        return bool(self.files)

    @property
    def files(self) -> list[SwapFile]:
        """The swap files of this rank."""
        return [file for opened in self._opened.values() for file in opened.files]

    @property
    def file_nbytes(self) -> int:
        """Bytes that are reserved in swap files; those that a real rank would reserve, if simulated."""
        return sum(file.reserved_nbytes for file in self.files)

    @property
    def timeline(self) -> TransferTimes | None:
        """The disk's transfers during the last update; None if no optimizer state is on disk."""
        return None if self._pager is None else self._pager.timeline

    @property
    def moved_nbytes(self) -> dict[str, int]:
        """Bytes since the engine was built: from and to disk, to the host and back to the device."""
        streams = self.streams or CopyStreams()
        return {
            "read_nbytes": sum(file.read_nbytes for file in self.files),
            "written_nbytes": sum(file.written_nbytes for file in self.files),
            "down_nbytes": streams.down_nbytes,
            "up_nbytes": streams.up_nbytes,
        }

    def finish_copies(self, *, wait: bool = True) -> bool:
        """Wait until no copy between host and device is in flight. Returns whether that is so.

        ``wait=False``: wait at most ``PATIENCE_S``. Copies may wait for a collective that never ends.
        """
        streams = self.streams
        if streams is None:
            return True
        if wait:
            streams.synchronize()
            return True

        def finish() -> None:
            choose_device(self._opening.device)
            streams.synchronize()

        waiting = threading.Thread(target=finish, name="zeroshard-copies", daemon=True)
        waiting.start()
        waiting.join(PATIENCE_S)
        return not waiting.is_alive()

    def close(self, *, wait: bool = True) -> None:
        """Free memory and disk space. ``wait``: see :meth:`finish_copies`."""
        is_idle = self.finish_copies(wait=wait)
        tiers = self._opened.values()
        for arena in [*self._arenas, *(arena for opened in tiers for arena in opened.arenas)]:
            arena.close() if is_idle else arena.keep_locked()
        self._hold(_COPY_BUFFERS, 0)
        self._hold(_OLD_STATE, 0)
        self._opening.ledger.hold("scratch", WEIGHTS_OWNER, 0)
        for opened in self._opened.values():
            opened.close()
