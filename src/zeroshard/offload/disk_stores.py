"""The disk as a tier: one swap file per directory, and the stores and pages in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zeroshard.device.pinned import HostArena
from zeroshard.offload.grad_store import DiskGradStore, GradStore
from zeroshard.offload.pager import Pager, page_nbytes, slot_sizes
from zeroshard.offload.planned_file import PlannedSwapFile
from zeroshard.offload.shard_store import DiskShardStore, ShardStore, WritesInFlight
from zeroshard.offload.staged_shard_store import StagedDiskShardStore, StagingSlots
from zeroshard.offload.swap_file import SwapFile
from zeroshard.offload.tier_stores import ChunkMemory, TierOpening, TierStores


class DiskStores(TierStores):
    """Swap files of this rank. Shards, gradients and chunks have memory only while they are in use."""

    def __init__(self, opening: TierOpening) -> None:
        super().__init__(opening)
        self._shard_writes, self._grad_writes = WritesInFlight(), WritesInFlight()
        self._files: dict[str, SwapFile] = {}
        self._pager: Pager | None = None
        self._slots: StagingSlots | None = None

    @property
    def files(self) -> list[SwapFile]:
        """See :class:`TierStores`."""
        return list(self._files.values())

    @property
    def arenas(self) -> list[HostArena]:
        """See :class:`TierStores`."""
        return [] if self._slots is None else self._slots.arenas

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`TierStores`. It is not pinned, since it is freed and allocated for each use.

        On its way to a GPU a shard is in the :class:`~zeroshard.offload.staged_shard_store.StagingSlots`.
        """
        device = self._opening.device if self._opening.is_planned else torch.device("cpu")
        return torch.zeros(numel, dtype=dtype, device=device)

    def shard_store(self, unit: str, shard_S: Tensor) -> ShardStore:
        """See :class:`TierStores`. The shard is on disk when this returns."""
        assert self._opening.param is not None
        file = self._file(self._opening.param.nvme_path)
        store = self._shard_store(unit, shard_S, file)
        store.write()
        store.finish()  # so that construction holds one shard at a time
        return store

    def _shard_store(self, unit: str, shard_S: Tensor, file: SwapFile) -> DiskShardStore:
        opening, streams = self._opening, self._opening.streams
        if streams is None:
            return DiskShardStore(
                shard_S, file, self._shard_writes, ledger=opening.ledger, name=unit
            )
        if self._slots is None:
            assert opening.param is not None
            self._slots = StagingSlots(opening.ledger, pin=opening.param.pin_memory)
        store = StagedDiskShardStore(
            shard_S,
            file,
            self._shard_writes,
            ledger=opening.ledger,
            name=unit,
            streams=streams,
            slots=self._slots,
        )
        opening.watched.append(store)
        return store

    def grad_store(self, unit: str, nbytes: int) -> GradStore | None:
        """See :class:`TierStores`."""
        return DiskGradStore(
            self._optimizer_file(),
            nbytes,
            self._grad_writes,
            ledger=self._opening.ledger,
            name=unit,
        )

    def open_pager(self, pages_nbytes: Sequence[int]) -> Pager | None:
        """See :class:`TierStores`."""
        self._pager = Pager(self._optimizer_file(), slot_sizes(pages_nbytes))
        return self._pager

    def chunk_memory(self, numel: int, dtypes: Mapping[str, torch.dtype]) -> ChunkMemory | None:
        """See :class:`TierStores`. The tensors are on a page, each at a multiple of 4096 bytes."""
        if (
            not dtypes
        ):  # masters that are the parameters, and no state: of the optimizer, or of padding
            if self._pager is not None:
                self._pager.skip()
            return None
        assert self._pager is not None
        page = self._pager.page(page_nbytes(numel, dtypes.values()))
        views, at = {}, 0
        for name, dtype in dtypes.items():
            views[name] = page.bytes[at : at + numel * dtype.itemsize].view(dtype)
            at += page_nbytes(numel, [dtype])
        return ChunkMemory(views, page)

    def close(self) -> None:
        """See :class:`TierStores`."""
        if self._pager is not None:
            self._pager.close()
        if self._slots is not None:
            self._slots.close()
        for file in self.files:
            file.close()

    def _optimizer_file(self) -> SwapFile:
        assert self._opening.optimizer is not None
        return self._file(self._opening.optimizer.nvme_path)

    def _file(self, path: str | None) -> SwapFile:
        assert path is not None, "the configuration is resolved"
        if path not in self._files:
            opening = self._opening
            self._files[path] = (
                PlannedSwapFile(path, device=opening.device, ledger=opening.ledger)
                if opening.is_planned
                else SwapFile(path, ledger=opening.ledger)
            )
        return self._files[path]
