"""Stores a shard on disk, for a unit that is gathered on a device with other memory.

The shard is read into page-locked memory and copied from there to the device, on a stream of its own. So
no copy is from pageable memory, which would make the host wait. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.device.pinned import HostArena, slot_nbytes
from zeroshard.errors import DiskError
from zeroshard.offload.shard_store import (
    DiskShardStore,
    EditWatch,
    WritesInFlight,
    gather_on_device,
)

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.offload.swap_file import SwapFile, Transfer

SLOTS = 3
"""One shard is read, one waits for its all-gather, one is copied to the device."""

_OWNER = "staging of shards"


@dataclass(eq=False, slots=True)
class StagingSlot:
    """Page-locked memory for one shard, as bytes. ``leaving``: the last copy out of it."""

    bytes: Tensor
    leaving: CopyHandle | None = None


class StagingSlots:
    """The slots of one engine, which are used in turn. They get memory at the first use."""

    def __init__(self, ledger: Ledger, *, pin: bool) -> None:
        self.arenas: list[HostArena] = []
        self._ledger = ledger
        self._pin = pin
        self._nbytes = 0
        self._free: deque[StagingSlot] = deque()

    def reserve(self, nbytes: int) -> None:
        """Make the slots at least that large. To be called before the first use."""
        assert not self.arenas, "the slots are in use"
        self._nbytes = max(self._nbytes, nbytes)

    @property
    def has_spare(self) -> bool:
        """Whether a slot may be used ahead of time. The last free one is for the next all-gather."""
        return not self.arenas or len(self._free) > 1

    def take(self) -> StagingSlot:
        """The slot that has been free for the longest time. Waits for the copy out of it."""
        if not self.arenas:
            arena = HostArena(SLOTS * slot_nbytes(self._nbytes, torch.uint8), self._pin)
            self.arenas.append(arena)
            self._ledger.hold("scratch", _OWNER, arena.nbytes, Tier.HOST)
            self._free.extend(
                StagingSlot(arena.take(self._nbytes, torch.uint8)) for _ in range(SLOTS)
            )
        slot = self._free.popleft()
        leaving, slot.leaving = slot.leaving, None
        if leaving is not None:
            leaving.synchronize()
        return slot

    def give_back(self, slot: StagingSlot, leaving: CopyHandle | None = None) -> None:
        """Free the slot when ``leaving`` has ended."""
        slot.leaving = leaving
        self._free.append(slot)

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
        self._streams = streams
        self._slots = slots
        self._watch = EditWatch()
        self._slot: StagingSlot | None = None  # what the next all-gather copies from
        self._staging: Transfer | None = None  # the read into it
        slots.reserve(shard_S.nbytes)

    def take_edited(self) -> Tensor | None:
        """See :class:`~zeroshard.offload.step_numbers.WatchedShard`."""
        return self._watch.take()

    def prefetch_gather(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        if self._slot is None and self._slots.has_spare:
            self._stage()

    def cancel_prefetch(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._unstage()
        super().cancel_prefetch()

    def write(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._unstage()  # these values are old now
        super().write()

    def open_gather(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        if self._slot is None:
            self._stage()
        assert self._staging is not None
        try:
            self._staging.wait()
        except DiskError:
            self._unstage()
            raise

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        slot, self._slot, self._staging = self._slot, None, None
        assert slot is not None, "open_gather() comes first"
        copy = self._streams.h2d(self._values_in(slot), part_S)
        self._slots.give_back(slot, copy)
        return gather_on_device(copy, comm, full_N, part_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._watch.begin(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. An edit waits for the device."""
        if edited:
            self.replace(part_S)
            self._watch.begin(part_S)
        else:
            self._watch.end(part_S)

    def close(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._unstage()
        super().close()

    def _values_in(self, slot: StagingSlot) -> Tensor:
        return slot.bytes[: self.shard_S.nbytes].view(self.shard_S.dtype)

    def _stage(self) -> None:
        self._slot = slot = self._slots.take()
        self._staging = self._file.read(self._extent, self._values_in(slot), after=self._write)

    def _unstage(self) -> None:
        if self._slot is not None:
            assert self._staging is not None
            self._staging.join()  # an error is ignored: the next use reads again
            self._slots.give_back(self._slot)
            self._slot = self._staging = None
