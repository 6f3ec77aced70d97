"""The disk as a tier: one swap file per directory, and the shards, gradients and pages in it.

A shard in a file is gathered from memory that it has only then. For a device with other memory it is read
into page-locked memory and copied from there, on a stream of its own: a copy from pageable memory would
make the host wait. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.device.pinned import HostArena, slot_nbytes
from zeroshard.errors import DiskError
from zeroshard.memory import storage
from zeroshard.memory.storage import fingerprint
from zeroshard.offload.grad_store import DiskGradStore, GradStore, WritesInFlight
from zeroshard.offload.offload_plan import STAGING_SLOTS
from zeroshard.offload.pager import Pager, page_nbytes, slot_sizes
from zeroshard.offload.shard_store import EditWatch, ShardStore, gather_on_device
from zeroshard.offload.swap_file import Extent, PlannedSwapFile, SwapFile, Transfer
from zeroshard.offload.tier_stores import ChunkMemory, TierOpening, TierStores

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

_OWNER = "staging of shards"


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
        return list(self._files.values())

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """It is not pinned, since it is freed and allocated for each use.

        On its way to a GPU a shard is in the :class:`StagingSlots`.
        """
        device = self._opening.device if self._opening.is_planned else torch.device("cpu")
        return torch.zeros(numel, dtype=dtype, device=device)

    def shard_store(self, unit: str, shard_S: Tensor) -> ShardStore:
        """The shard is on disk when this returns."""
        opening, section = self._opening, self._opening.param
        assert section is not None
        file, writes = self._file(section.nvme_path), self._shard_writes
        if opening.streams is None:
            store = DiskShardStore(shard_S, file, writes, ledger=opening.ledger, name=unit)
        else:
            if self._slots is None:
                self._slots = StagingSlots(opening.ledger, self.arenas, pin=section.pin_memory)
            store = StagedDiskShardStore(
                shard_S,
                file,
                writes,
                ledger=opening.ledger,
                name=unit,
                streams=opening.streams,
                slots=self._slots,
            )
            opening.watched.append(store.watch)
        store.write()
        store.finish()  # so that construction holds one shard at a time
        return store

    def grad_store(self, unit: str, nbytes: int) -> GradStore | None:
        ledger = self._opening.ledger
        return DiskGradStore(
            self._optimizer_file(), nbytes, self._grad_writes, ledger=ledger, name=unit
        )

    def open_pager(self, pages_nbytes: Sequence[int]) -> Pager | None:
        self._pager = Pager(self._optimizer_file(), slot_sizes(pages_nbytes))
        return self._pager

    def chunk_memory(self, numel: int, dtypes: Mapping[str, torch.dtype]) -> ChunkMemory | None:
        """The tensors are on a page, each at a multiple of 4096 bytes."""
        if (
            not dtypes
        ):  # masters that are the parameters, and no state: of the optimizer, or padding
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


class DiskShardStore(ShardStore):
    """A shard in a file. It has memory only while it is read or transferred.

    The constructor does not write. Call :meth:`write` while ``shard_S`` has its first values.
    """

    def __init__(
        self, shard_S: Tensor, file: SwapFile, writes: WritesInFlight, *, ledger: Ledger, name: str
    ) -> None:
        super().__init__(shard_S, Tier.DISK)
        self._file = file
        self._writes = writes
        self._ledger = ledger
        self.name = name
        self._extent: Extent = file.reserve(shard_S.nbytes)
        self._readers = 0
        self._read: Transfer | None = None
        self._write: Transfer | None = None
        self._here = True  # shard_S has memory
        self._print: int | None = None  # fingerprint of this rank's part when the unit became full
        self._report()

    def prefetch(self) -> None:
        """If the shard's write has not ended, its memory is only kept."""
        if not self._here:
            self._allocate()
            self._read = self._file.read(self._extent, self.shard_S)

    def acquire(self) -> Tensor:
        """Waits for a write of the shard: the caller may change the values.

        Raises:
            DiskError: the file cannot be read or written.
        """
        if self._write is not None:
            self._write.wait()
        return self._acquire_to_read()

    def _acquire_to_read(self) -> Tensor:
        self.prefetch()
        read, self._read = self._read, None
        if read is not None:
            try:
                read.wait()
            except DiskError:
                self._release_if_idle()  # the contents of the memory are not the shard
                raise
        self._readers += 1
        return self.shard_S

    def release(self) -> None:
        assert self._readers, f"no read of {self.name} was started"
        self._readers -= 1
        self._release_if_idle()

    def cancel_prefetch(self) -> None:
        if self._read is not None:
            self._read.join()  # an error is ignored: the next acquire() reads again
            self._read = None
        self._release_if_idle()

    def write(self) -> None:
        """Only starts the write. If it fails, the next use raises."""
        assert self._here, f"{self.name} is not in memory"
        assert self._read is None, f"{self.name} is still being read"
        assert self._write is None or self._write.done, f"acquire() of {self.name} comes first"
        self._write = self._file.write(self._extent, self.shard_S)
        self._writes.add(self.finish)

    def finish(self) -> None:
        """Wait until the values are in the file, and free their memory unless it is being read."""
        if self._write is not None:
            self._write.wait()
            self._write = None
        self._release_if_idle()

    def prefetch_gather(self) -> None:
        self.prefetch()

    def open_gather(self) -> None:
        self._acquire_to_read()

    def close_gather(self, part_S: Tensor) -> None:
        self.release()
        self._print = _print_of(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Fingerprints the part, and writes it only if it was edited."""
        if self._print != _print_of(part_S):
            self.replace(part_S)
            self._print = _print_of(part_S)

    def replace(self, part_S: Tensor) -> None:
        """Store other values, of a tensor on any device."""
        self.cancel_prefetch()
        if self._write is not None:
            self.finish()
        if not self._here:
            self._allocate()
        self.shard_S.copy_(part_S)
        self.write()

    def close(self) -> None:
        for transfer in (self._read, self._write):
            if transfer is not None:
                transfer.join()
        self._read = self._write = None
        self._readers = 0
        self._release_if_idle()
        self._ledger.hold("parameters", self.name, 0, Tier.DISK)

    def _allocate(self) -> None:
        storage.allocate(self.shard_S)
        self._here = True
        self._report()

    def _release_if_idle(self) -> None:
        if self._here and not self._readers and self._read is None and self._write is None:
            storage.release(self.shard_S)
            self._here = False
            self._report()

    def _report(self) -> None:
        nbytes = self.shard_S.nbytes if self._here else 0
        self._ledger.hold("scratch", f"{self.name} (shard)", nbytes, Tier.HOST)


def _print_of(part_S: Tensor) -> int:
    found = fingerprint(part_S)
    return 0 if isinstance(found, FakeTensor) else int(found)  # a simulated program edits nothing


class StagingSlots:
    """Page-locked memory for shards of one engine: slots, uint8, that are used in turn.

    ``arenas`` gets the memory, at the first use. Beside each free slot is the last copy out of it.
    """

    def __init__(self, ledger: Ledger, arenas: list[HostArena], *, pin: bool) -> None:
        self._arenas = arenas
        self._ledger = ledger
        self._pin = pin
        self._nbytes = 0
        self._free: deque[tuple[Tensor, CopyHandle | None]] = deque()

    def reserve(self, nbytes: int) -> None:
        """Make the slots at least that large. To be called before the first use."""
        assert not self._arenas, "the slots are in use"
        self._nbytes = max(self._nbytes, nbytes)

    @property
    def has_spare(self) -> bool:
        """Whether a slot may be used ahead of time. The last free one is for the next all-gather."""
        return not self._arenas or len(self._free) > 1

    def take(self) -> Tensor:
        """The slot that has been free for the longest time. Waits for the copy out of it."""
        if not self._arenas:
            arena = HostArena(STAGING_SLOTS * slot_nbytes(self._nbytes, torch.uint8), self._pin)
            self._arenas.append(arena)
            self._ledger.hold("scratch", _OWNER, arena.nbytes, Tier.HOST)
            for _ in range(STAGING_SLOTS):
                self.give_back(arena.take(self._nbytes, torch.uint8))
        slot, leaving = self._free.popleft()
        if leaving is not None:
            leaving.synchronize()
        return slot

    def give_back(self, slot: Tensor, leaving: CopyHandle | None = None) -> None:
        """Free the slot when ``leaving`` has ended."""
        self._free.append((slot, leaving))

    def close(self) -> None:
        """Report that the memory is free."""
        self._ledger.hold("scratch", _OWNER, 0, Tier.HOST)


class StagedDiskShardStore(DiskShardStore):
    """A shard in a file, for a device with other memory. For updates, it is as in its base class."""

    def __init__(
        self,
        shard_S: Tensor,
        file: SwapFile,
        writes: WritesInFlight,
        *,
        ledger: Ledger,
        name: str,
        streams: CopyStreams,
        slots: StagingSlots,
    ) -> None:
        super().__init__(shard_S, file, writes, ledger=ledger, name=name)
        self.watch = EditWatch(name)
        self._streams = streams
        self._slots = slots
        self._slot: Tensor | None = None  # what the next all-gather copies from
        self._staging: Transfer | None = None  # the read into it
        slots.reserve(shard_S.nbytes)

    def prefetch_gather(self) -> None:
        if self._slot is None and self._slots.has_spare:
            self._stage()

    def cancel_prefetch(self) -> None:
        self._unstage()
        super().cancel_prefetch()

    def write(self) -> None:
        self._unstage()  # these values are old now
        super().write()

    def open_gather(self) -> None:
        if self._slot is None:
            self._stage()
        assert self._staging is not None
        try:
            self._staging.wait()
        except DiskError:
            self._unstage()
            raise

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        slot, self._slot, self._staging = self._slot, None, None
        assert slot is not None, "open_gather() comes first"
        copy = self._streams.h2d(self._values_in(slot), part_S)
        self._slots.give_back(slot, copy)
        return gather_on_device(copy, comm, full_N, part_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        self.watch.begin(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """An edit waits for the device."""
        if edited:
            self.replace(part_S)
            self.watch.begin(part_S)
        else:
            self.watch.end(part_S)

    def close(self) -> None:
        self._unstage()
        super().close()

    def _values_in(self, slot: Tensor) -> Tensor:
        return slot[: self.shard_S.nbytes].view(self.shard_S.dtype)

    def _stage(self) -> None:
        self._slot = slot = self._slots.take()
        self._staging = self._file.read(self._extent, self._values_in(slot), after=self._write)

    def _unstage(self) -> None:
        if self._slot is not None:
            assert self._staging is not None
            self._staging.join()  # an error is ignored: the next use reads again
            self._slots.give_back(self._slot)
            self._slot = self._staging = None
