"""Stores a unit's shard in memory or on disk, behind one interface.

A unit calls the methods of its store and does not know which kind it has (ADR 0008). Letters as in
:mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError
from zeroshard.memory import storage

if TYPE_CHECKING:
    from zeroshard.offload.swap_file import Extent, SwapFile, Transfer

WRITES_IN_FLIGHT = 2
"""Writes of shards, or of gradients, in flight at a time. More would hold memory and gain no speed."""


class MemoryShardStore:
    """A shard that is always in memory, on the device or in host memory."""

    def __init__(self, shard_S: Tensor, tier: Tier = Tier.DEVICE) -> None:
        self.shard_S = shard_S
        self.tier = tier

    def prefetch(self) -> None:
        """Start reading the shard into memory."""

    def acquire(self) -> Tensor:
        """The shard, readable until :meth:`release`. Calls may nest."""
        return self.shard_S

    def release(self) -> None:
        """End one :meth:`acquire`."""

    def cancel_prefetch(self) -> None:
        """Free a shard that was prefetched and not used."""

    def write(self) -> None:
        """Store the values that the shard in memory was updated to."""

    def write_back_if_changed(self, part_S: Tensor) -> None:
        """Take over ``part_S``, this rank's part of the full unit, if the program wrote into it."""
        self.shard_S.copy_(part_S)

    def on_unshard(self, part_S: Tensor) -> None:
        """Note that the unit is full. ``part_S`` is this rank's part of it."""

    def close(self) -> None:
        """Free the shard."""


class PendingWrite(Protocol):
    """A write that runs while computation goes on."""

    def finish(self) -> None:
        """Wait until the values are in the file, and free their memory if it is not in use."""


class WritesInFlight:
    """The writes in flight of one kind, oldest first. Bounds the memory that they hold."""

    def __init__(self) -> None:
        self._leaving: deque[PendingWrite] = deque()

    def add(self, rest: PendingWrite) -> None:
        """Add a write. While there are more than ``WRITES_IN_FLIGHT``, wait for the oldest."""
        self._leaving.append(rest)
        while len(self._leaving) > WRITES_IN_FLIGHT:
            self._leaving.popleft().finish()


class DiskShardStore:
    """A shard in a file. It has memory only while it is read or transferred.

    The constructor does not write. Call :meth:`write` while ``shard_S`` has its first values.
    """

    tier = Tier.DISK

    def __init__(
        self, shard_S: Tensor, file: SwapFile, writes: WritesInFlight, *, ledger: Ledger, name: str
    ) -> None:
        self.shard_S = shard_S
        self._file = file
        self._writes = writes
        self._ledger = ledger
        self._name = name
        self._extent: Extent = file.reserve(storage.flat_nbytes(shard_S))
        self._readers = 0
        self._read: Transfer | None = None
        self._write: Transfer | None = None
        self._here = True  # shard_S has memory
        self._print: int | None = None  # fingerprint of this rank's part when the unit became full
        self._report()

    def prefetch(self) -> None:
        """See :class:`MemoryShardStore`. If the shard's write has not ended, its memory is only kept."""
        if not self._here:
            self._allocate()
            self._read = self._file.read(self._extent, self.shard_S)

    def acquire(self) -> Tensor:
        """See :class:`MemoryShardStore`.

        Raises:
            DiskError: the file cannot be read.
        """
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
        """See :class:`MemoryShardStore`."""
        assert self._readers, f"nobody reads {self._name}"
        self._readers -= 1
        self._release_if_idle()

    def cancel_prefetch(self) -> None:
        """See :class:`MemoryShardStore`."""
        if self._read is not None:
            self._read.join()  # an error is ignored: the next acquire() reads again
            self._read = None
        self._release_if_idle()

    def write(self) -> None:
        """See :class:`MemoryShardStore`. Only starts the write. If it fails, the next use raises."""
        assert self._here, f"{self._name} is not in hand"
        assert self._read is None, f"{self._name} is still being read"
        if self._write is not None:
            self._write.wait()
        self._write = self._file.write(self._extent, self.shard_S)
        self._writes.add(self)

    def finish(self) -> None:
        """Wait until the values are in the file, and free their memory unless it is being read."""
        if self._write is not None:
            self._write.wait()
            self._write = None
        self._release_if_idle()

    def write_back_if_changed(self, part_S: Tensor) -> None:
        """See :class:`MemoryShardStore`. Fingerprints the part, and writes it only if it was edited."""
        if self._print == int(storage.fingerprint(part_S)):
            return
        self.cancel_prefetch()
        if self._write is not None:
            self.finish()
        if not self._here:
            self._allocate()
        self.shard_S.copy_(part_S)
        self.write()
        self._print = int(storage.fingerprint(part_S))

    def on_unshard(self, part_S: Tensor) -> None:
        """See :class:`MemoryShardStore`."""
        self._print = int(storage.fingerprint(part_S))

    def close(self) -> None:
        """See :class:`MemoryShardStore`."""
        for transfer in (self._read, self._write):
            if transfer is not None:
                transfer.join()
        self._read = self._write = None
        self._readers = 0
        self._release_if_idle()
        self._ledger.hold("parameters", self._name, 0, Tier.DISK)

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
        nbytes = storage.flat_nbytes(self.shard_S) if self._here else 0
        self._ledger.hold("scratch", f"{self._name} (shard)", nbytes, Tier.HOST)


ShardStore = MemoryShardStore | DiskShardStore

AllocateShard = Callable[[int, torch.dtype], Tensor]
"""Gives zeroed memory for a shard: a flat tensor ``[numel]`` of a dtype."""
