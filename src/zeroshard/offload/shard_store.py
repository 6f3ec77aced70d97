"""How does a unit's shard rest, and how does it come to be read?

A unit asks its ``rest`` and never learns which one it has. Letters as in :mod:`zeroshard.zero.unit`.
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

SAVES_IN_FLIGHT = 2
"""Shards, or gradients, that may be on their way to the disk; more would hold memory for no speed."""


class MemoryShardStore:
    """A shard that is always there: on the device, or in host memory."""

    def __init__(self, shard_S: Tensor, tier: Tier = Tier.DEVICE) -> None:
        self.shard_S = shard_S
        self.tier = tier

    def prefetch(self) -> None:
        """Begin to bring the shard into memory."""

    def acquire(self) -> Tensor:
        """The shard, readable until :meth:`leave`. Calls may nest."""
        return self.shard_S

    def release(self) -> None:
        """The reader is through."""

    def cancel_prefetch(self) -> None:
        """What was fetched and not used may go."""

    def write(self) -> None:
        """The shard in hand was written: its values go to where it rests."""

    def write_back_if_changed(self, part_S: Tensor) -> None:
        """The program may have written into the gathered unit; ``part_S`` is this rank's part of it."""
        self.shard_S.copy_(part_S)

    def on_unshard(self, part_S: Tensor) -> None:
        """The unit is full, and ``part_S`` is this rank's part of it."""

    def close(self) -> None:
        """The shard is not needed any more."""


class PendingWrite(Protocol):
    """Something that is written behind the computation."""

    def finish(self) -> None:
        """Wait until it is in the file; its memory may go."""


class WritesInFlight:
    """The writes in flight of one kind, oldest first: bounds the memory that they hold."""

    def __init__(self) -> None:
        self._leaving: deque[PendingWrite] = deque()

    def add(self, rest: PendingWrite) -> None:
        """One more; the oldest ends first if there are too many."""
        self._leaving.append(rest)
        while len(self._leaving) > SAVES_IN_FLIGHT:
            self._leaving.popleft().finish()


class DiskShardStore:
    """A shard in a file. Its memory exists while somebody reads it, or while it is on its way.

    Creation does not write: :meth:`save` does, while ``shard_S`` has its first values.
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
        self._here = True  # has it memory?
        self._print: int | None = None  # of the values that the unit was gathered with
        self._report()

    def prefetch(self) -> None:
        """See :class:`InMemory`. A shard still on its way out only stays."""
        if not self._here:
            self._allocate()
            self._read = self._file.read(self._extent, self.shard_S)

    def acquire(self) -> Tensor:
        """See :class:`InMemory`. Raises :class:`DiskError` if the file cannot be read."""
        self.prefetch()
        read, self._read = self._read, None
        if read is not None:
            try:
                read.wait()
            except DiskError:
                self._release_if_idle()  # or the next reader would take what is there for the shard
                raise
        self._readers += 1
        return self.shard_S

    def release(self) -> None:
        """See :class:`InMemory`."""
        assert self._readers, f"nobody reads {self._name}"
        self._readers -= 1
        self._release_if_idle()

    def cancel_prefetch(self) -> None:
        """See :class:`InMemory`."""
        if self._read is not None:
            self._read.join()  # whoever needs the shard will read it again, and hear of an error
            self._read = None
        self._release_if_idle()

    def write(self) -> None:
        """See :class:`InMemory`. The write goes on behind; its errors surface at the next use."""
        assert self._here, f"{self._name} is not in hand"
        assert self._read is None, f"{self._name} is still being read"
        if self._write is not None:
            self._write.wait()
        self._write = self._file.write(self._extent, self.shard_S)
        self._writes.add(self)

    def finish(self) -> None:
        """Wait until the values are in the file; the memory goes if nobody reads it."""
        if self._write is not None:
            self._write.wait()
            self._write = None
        self._release_if_idle()

    def write_back_if_changed(self, part_S: Tensor) -> None:
        """See :class:`InMemory`. Costs a look at the part, and a write only where it was edited."""
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
        """See :class:`InMemory`."""
        self._print = int(storage.fingerprint(part_S))

    def close(self) -> None:
        """See :class:`InMemory`."""
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
"""Gives zeroed memory, ``[numel]`` of a dtype."""
