"""Makes the stores, pagers and buffers for state outside the device.

They follow the plan of :mod:`zeroshard.offload.plan`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.env import RankInfo
from zeroshard.config import Config
from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.memory.malloc import return_large_blocks
from zeroshard.memory.pinned import HostArena, slot_nbytes
from zeroshard.offload.copy_streams import CopyStreams, CudaCopyStreams
from zeroshard.offload.grad_store import DiscardedGradStore, DiskGradStore, GradStore
from zeroshard.offload.host_chunk import HostStaging
from zeroshard.offload.pager import Pager, Timeline
from zeroshard.offload.plan import OffloadPlan, grad_itemsize, host_sizes, page_sizes
from zeroshard.offload.shard_store import (
    AllocateShard,
    DiskShardStore,
    MemoryShardStore,
    ShardStore,
    WritesInFlight,
)
from zeroshard.offload.swap_file import SwapFile
from zeroshard.optim.factory import Probe
from zeroshard.optim.fused_update import threads_for


def has_copy_streams(device: torch.device) -> bool:
    """Whether host memory differs from the device's memory."""
    return device.type != "cpu"


def make_copy_streams(device: torch.device, *, copies: bool) -> CopyStreams | None:
    """Copies between ``device`` and host memory. None if they are one memory, unless ``copies``."""
    if device.type == "cuda":
        return CudaCopyStreams(device)
    return CopyStreams() if copies else None


class Stores:
    """The swap files of one engine on this rank, one for each directory, and the stores that use them.

    Under fake tensors no file is opened, and stores keep fake tensors.
    """

    def __init__(
        self, config: Config, ledger: Ledger, offload_plan: OffloadPlan, device: torch.device
    ) -> None:
        zero = config.zero_optimization
        self._ledger = ledger
        self._writes, self._grad_saves = WritesInFlight(), WritesInFlight()
        self._files: dict[str, SwapFile] = {}
        self._pager: Pager | None = None
        self._optimizer_path = zero.offload_optimizer.nvme_path if zero.offload_optimizer else None
        self._param_path = zero.offload_param.nvme_path if zero.offload_param else None
        self._resting = offload_plan
        self._is_fake = isinstance(torch.empty(0), FakeTensor)
        self._device = device
        sections = {"optimizer": zero.offload_optimizer, "param": zero.offload_param}
        self._pins = {name: s is not None and s.pin_memory for name, s in sections.items()}
        self.is_delayed = (
            zero.offload_optimizer is not None and zero.offload_optimizer.delayed_update
        )
        self._arenas: list[HostArena] = []
        self.streams: CopyStreams | None = None
        if device.type == "cpu" and (
            offload_plan.grads or Tier.DISK in offload_plan.params.values()
        ):
            return_large_blocks()  # shards and gradients are allocated and freed between activations

    def _file(self, path: str | None) -> SwapFile:
        assert path is not None, "the configuration is resolved"
        if path not in self._files:
            self._files[path] = SwapFile(path)
        return self._files[path]

    def shard_store_of(self, unit: str) -> Callable[[Tensor], ShardStore]:
        """A function that makes the unit's shard store from its shard."""
        tier = self._resting.tier_of(unit)
        if tier is not Tier.DISK or self._is_fake:
            return partial(MemoryShardStore, tier=tier)

        def on_disk(shard_S: Tensor) -> ShardStore:
            rest = DiskShardStore(
                shard_S, self._file(self._param_path), self._writes, ledger=self._ledger, name=unit
            )
            rest.write()
            rest.finish()  # so that construction holds one shard at a time
            return rest

        return on_disk

    def allocator_of(self, unit: str) -> AllocateShard | None:
        """A function that gives the unit's shard its memory; None: on the device.

        A shard in host memory is pinned on a GPU host, since it is copied to the GPU for each use. One on
        disk has memory only during use, and so cannot stay pinned.
        """
        tier = self._resting.tier_of(unit)
        if tier is Tier.DEVICE:
            return None
        if tier is Tier.DISK or self._device.type == "cpu" or self._is_fake:
            return lambda numel, dtype: torch.zeros(numel, dtype=dtype)

        def pinned(numel: int, dtype: torch.dtype) -> Tensor:
            arena = HostArena(slot_nbytes(numel, dtype), self._pins["param"])
            self._arenas.append(arena)
            return arena.take(numel, dtype)

        return pinned

    def grad_store_of(self, unit: str, nbytes: int) -> GradStore | None:
        """The store for the unit's reduced gradient of ``nbytes``; None: it stays in its buffer."""
        if unit not in self._resting.grads:
            return None
        if self._is_fake:
            return DiscardedGradStore(ledger=self._ledger, name=unit)
        file = self._file(self._optimizer_path)
        return DiskGradStore(file, nbytes, self._grad_saves, ledger=self._ledger, name=unit)

    def pager(self, found: Mapping[torch.dtype, Probe]) -> Pager | None:
        """The ring for pages on disk; None if there are none."""
        largest = max(page_sizes(self._resting, found), default=0)
        if not largest or self._is_fake:
            return None
        self._pager = Pager(self._file(self._optimizer_path), largest)
        return self._pager

    def host_staging(self) -> HostStaging | None:
        """The copies and buffers for chunks updated in host memory; None if they need none.

        On CPU ranks only the delayed update needs them: forward may not read what an update is writing.
        """
        wanted = list(host_sizes(self._resting))
        if not wanted or self._is_fake:
            return None
        self.streams = make_copy_streams(self._device, copies=self.is_delayed)
        if self.streams is None:
            return None
        nbytes = dict.fromkeys(("master", "scratch"), 0)
        for category, numel, dtype in wanted:
            nbytes[category] += slot_nbytes(numel, dtype)
        self._ledger.hold("scratch", "buffers of the bus", nbytes["scratch"], Tier.HOST)
        arena = HostArena(sum(nbytes.values()), self._pins["optimizer"])
        self._arenas.append(arena)
        return HostStaging(self.streams, arena.take, grad_itemsize(self._resting))

    @property
    def uses_disk(self) -> bool:
        """Whether anything is stored on disk."""
        return bool(self._files)

    @property
    def timeline(self) -> Timeline | None:
        """The disk's transfers during the last update; None if no optimizer state is on disk."""
        return None if self._pager is None else self._pager.timeline

    @property
    def moved_nbytes(self) -> dict[str, int]:
        """Bytes since the engine was built: from and to disk, to the host and back to the device."""
        streams = self.streams or CopyStreams()
        return {
            "read_nbytes": sum(file.read_nbytes for file in self._files.values()),
            "written_nbytes": sum(file.written_nbytes for file in self._files.values()),
            "down_nbytes": streams.down_nbytes,
            "up_nbytes": streams.up_nbytes,
        }

    def close(self) -> None:
        """Free memory and disk space."""
        for arena in self._arenas:
            arena.close()
        self._ledger.hold("scratch", "buffers of the bus", 0, Tier.HOST)
        if self._pager is not None:
            self._pager.close()
        for file in self._files.values():
            file.close()


def update_threads(device: torch.device, place: RankInfo) -> int:
    """Threads for the update in host memory.

    On a GPU host, this rank's share of the cores. On CPU ranks torch's number of threads, since the same
    cores compute forward and backward.
    """
    omp = torch.get_num_threads()
    if device.type == "cpu":
        return omp
    has_mask = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1
    return threads_for(sys.maxsize, cores, place.local_world_size, omp)
