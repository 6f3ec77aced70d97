"""Stores a unit's shard in memory or on disk, behind one interface.

A unit calls the methods of its store and does not know which kind it has (ADR 0008). Letters as in
:mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.errors import DiskError
from zeroshard.memory import storage
from zeroshard.memory.storage import fingerprint

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.offload.swap_file import Extent, SwapFile, Transfer

WRITES_IN_FLIGHT = 2
"""Writes of shards, or of gradients, in flight at a time. More would hold memory and gain no speed."""


class ShardStore(Protocol):
    """Where a unit's shard is stored. ``shard_S`` is the shard, ``tier`` the tier of its store.

    ``part_S`` is this rank's part of the full unit, on the device. ``memories``: flat tensors of all
    that is stored between uses of the unit, of which ``shard_S`` is all or a part.
    """

    shard_S: Tensor
    tier: Tier

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """The memory of the store."""

    # For updates and checkpoints, which use the shard where it is stored.

    def prefetch(self) -> None:
        """Start reading the shard into memory."""

    def acquire(self) -> Tensor:
        """The shard, readable until :meth:`release`. Calls may nest."""

    def release(self) -> None:
        """End one :meth:`acquire`."""

    def write(self) -> None:
        """Store the values that the shard in memory was updated to."""

    # For the all-gather of the unit.

    def prefetch_gather(self) -> None:
        """Start reading the shard for an all-gather."""

    def cancel_prefetch(self) -> None:
        """Free a shard that was prefetched and not used."""

    def open_gather(self) -> None:
        """Make the shard readable for :meth:`all_gather`. If this raises, nothing has changed."""

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """Start the all-gather of the shard into ``full_N``."""

    def close_gather(self, part_S: Tensor) -> None:
        """Note that the all-gather has ended. The current stream may use the full unit."""

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Take over ``part_S`` if the program wrote into it since the all-gather.

        ``edited``: it is known that it did. Else the store finds out, if it can.
        """

    def close(self) -> None:
        """Free the shard."""


class MemoryShardStore:
    """A shard that is always in memory, which is that of the device."""

    def __init__(self, shard_S: Tensor, tier: Tier = Tier.DEVICE) -> None:
        self.shard_S = shard_S
        self.tier = tier

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """See :class:`ShardStore`."""
        return (self.shard_S,)

    def prefetch(self) -> None:
        """See :class:`ShardStore`."""

    def acquire(self) -> Tensor:
        """See :class:`ShardStore`."""
        return self.shard_S

    def release(self) -> None:
        """See :class:`ShardStore`."""

    def write(self) -> None:
        """See :class:`ShardStore`."""

    def prefetch_gather(self) -> None:
        """See :class:`ShardStore`."""

    def cancel_prefetch(self) -> None:
        """See :class:`ShardStore`."""

    def open_gather(self) -> None:
        """See :class:`ShardStore`."""

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`ShardStore`."""
        return comm.all_gather(full_N, self.shard_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`ShardStore`."""

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`ShardStore`. Copies S elements in any case, which costs less than to compare."""
        self.shard_S.copy_(part_S)

    def close(self) -> None:
        """See :class:`ShardStore`."""


class EditWatch:
    """Finds out whether this rank's part of a unit was edited between an all-gather and its end.

    The answer stays on the device, since the host would have to wait for it.
    """

    def __init__(self) -> None:
        self._print: Tensor | None = None
        self._edited: Tensor | None = None  # 0-dim bool: in any pass since the last :meth:`take`

    def begin(self, part_S: Tensor) -> None:
        """Note the values of the part. Edits before this are known to the store."""
        self._print = fingerprint(part_S)

    def end(self, part_S: Tensor) -> None:
        """Compare the values."""
        edited: Any = fingerprint(part_S) != self._print
        self._edited = edited if self._edited is None else self._edited | edited

    def take(self) -> Tensor | None:
        """The answer for all passes since the last call; None: there was none."""
        edited, self._edited = self._edited, None
        return edited


class HostShardStore(MemoryShardStore):
    """A shard in host memory, for a unit that is gathered on a device with other memory.

    The shard is copied to this rank's part of the full unit, on a stream of its own. Nothing is copied
    back unless the program wrote into the part.
    """

    def __init__(self, shard_S: Tensor, streams: CopyStreams, *, tier: Tier, name: str) -> None:
        super().__init__(shard_S, tier)
        self.name = name
        self._streams = streams
        self._watch = EditWatch()
        self._written: CopyHandle | None = None  # an edit on its way to the host
        self._gathered: CopyHandle | None = None  # the last copy to the device

    def take_edited(self) -> Tensor | None:
        """See :class:`~zeroshard.offload.step_numbers.WatchedShard`."""
        return self._watch.take()

    def acquire(self) -> Tensor:
        """See :class:`ShardStore`. Waits for copies of the shard: the host may write it."""
        for copy in (self._written, self._gathered):
            if copy is not None:
                copy.synchronize()
        self._written = self._gathered = None
        return self.shard_S

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`ShardStore`. The current stream waits for the copy in the handle's ``wait``."""
        written, self._written = self._written, None
        if written is not None:
            written.wait_stream()
        copy = self._gathered = self._streams.h2d(self.shard_S, part_S)
        return gather_on_device(copy, comm, full_N, part_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`ShardStore`."""
        self._watch.begin(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`ShardStore`. Does not wait for the device."""
        if edited:
            self._written = self._streams.d2h(part_S, self.shard_S)
            self._watch.begin(part_S)
        else:
            self._watch.end(part_S)


def gather_on_device(
    copy: CopyHandle, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str
) -> Handle:
    """Start the all-gather of ``part_S`` in ``full_N`` behind the ``copy`` of the shard to ``part_S``.

    The current stream does not wait for the copy before the handle's ``wait``.
    """
    if comm.size == 1:
        comm.recorder.all_gather(name, full_N, part_S)
        return CopyGather(copy)
    with copy.behind():
        return comm.all_gather(full_N, part_S, name=name)


class CopyGather:
    """The all-gather of one rank, which is a copy to the device."""

    __slots__ = ("_copy",)

    def __init__(self, copy: CopyHandle) -> None:
        self._copy = copy

    def wait(self) -> None:
        """See :class:`~zeroshard.comm.collectives.Handle`."""
        self._copy.wait_stream()


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

    def __init__(
        self, shard_S: Tensor, file: SwapFile, writes: WritesInFlight, *, ledger: Ledger, name: str
    ) -> None:
        self.shard_S = shard_S
        self.tier = Tier.DISK
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

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """See :class:`ShardStore`. It is in the file most of the time."""
        return (self.shard_S,)

    def prefetch(self) -> None:
        """See :class:`ShardStore`. If the shard's write has not ended, its memory is only kept."""
        if not self._here:
            self._allocate()
            self._read = self._file.read(self._extent, self.shard_S)

    def acquire(self) -> Tensor:
        """See :class:`ShardStore`. Waits for a write of the shard: the caller may change the values.

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
        """See :class:`ShardStore`."""
        assert self._readers, f"no read of {self.name} was started"
        self._readers -= 1
        self._release_if_idle()

    def cancel_prefetch(self) -> None:
        """See :class:`ShardStore`."""
        if self._read is not None:
            self._read.join()  # an error is ignored: the next acquire() reads again
            self._read = None
        self._release_if_idle()

    def write(self) -> None:
        """See :class:`ShardStore`. Only starts the write. If it fails, the next use raises."""
        assert self._here, f"{self.name} is not in memory"
        assert self._read is None, f"{self.name} is still being read"
        assert self._write is None or self._write.done, f"acquire() of {self.name} comes first"
        self._write = self._file.write(self._extent, self.shard_S)
        self._writes.add(self)

    def finish(self) -> None:
        """Wait until the values are in the file, and free their memory unless it is being read."""
        if self._write is not None:
            self._write.wait()
            self._write = None
        self._release_if_idle()

    prefetch_gather = prefetch

    def open_gather(self) -> None:
        """See :class:`ShardStore`."""
        self._acquire_to_read()

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`ShardStore`."""
        return comm.all_gather(full_N, self.shard_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`ShardStore`."""
        self.release()
        self._print = _print_of(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`ShardStore`. Fingerprints the part, and writes it only if it was edited."""
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
        """See :class:`ShardStore`."""
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


AllocateShard = Callable[[int, torch.dtype], Tensor]
"""Gives zeroed memory for a shard: a flat tensor ``[numel]`` of a dtype."""
