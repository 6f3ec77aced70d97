"""Stores a unit's shard in memory: that of the device, or that of the host beside a device.

A unit calls the methods of its store and does not know which kind it has (ADR 0008). Other kinds are in
:mod:`zeroshard.offload.disk_stores` and :mod:`zeroshard.offload.zeropp_stores`. Letters as in
:mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zeroshard.core.tiers import Tier
from zeroshard.device.copy_streams import CopyHandle, CopyStreams
from zeroshard.memory.storage import fingerprint

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

AllocateShard = Callable[[int, torch.dtype], Tensor]
"""Gives zeroed memory for a shard: a flat tensor ``[numel]`` of a dtype."""


class ShardStore:
    """Where a unit's shard is stored: here always in memory, which is that of the device.

    ``shard_S`` is the shard, ``tier`` the tier of its store. ``part_S`` is this rank's part of the full
    unit, on the device. A subclass overrides what is different.
    """

    def __init__(self, shard_S: Tensor, tier: Tier = Tier.DEVICE) -> None:
        self.shard_S = shard_S
        self.tier = tier

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """Flat tensors of all that is stored between uses of the unit; ``shard_S`` is all or a part."""
        return (self.shard_S,)

    # For updates and checkpoints, which use the shard where it is stored.

    def prefetch(self) -> None:
        """Start reading the shard into memory."""

    def acquire(self) -> Tensor:
        """The shard, readable until :meth:`release`. Calls may nest."""
        return self.shard_S

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
        return comm.all_gather(full_N, self.shard_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """Note that the all-gather has ended. The current stream may use the full unit."""

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Take over ``part_S`` if the program wrote into it since the all-gather.

        ``edited``: it is known that it did. Else the store finds out, if it can. Here S elements are
        copied in any case, which costs less than to compare.
        """
        self.shard_S.copy_(part_S)

    def close(self) -> None:
        """Free the shard."""


class EditWatch:
    """Finds out whether this rank's part of a unit was edited between an all-gather and its end.

    The answer stays on the device, since the host would have to wait for it. ``name``: of the unit.
    """

    def __init__(self, name: str) -> None:
        self.name = name
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
        """0-dim bool on the device: the answer for all passes since the last call; None: no pass."""
        edited, self._edited = self._edited, None
        return edited


class HostShardStore(ShardStore):
    """A shard in host memory, for a unit that is gathered on a device with other memory.

    The shard is copied to this rank's part of the full unit, on a stream of its own. Nothing is copied
    back unless the program wrote into the part.
    """

    def __init__(self, shard_S: Tensor, streams: CopyStreams, *, tier: Tier, name: str) -> None:
        super().__init__(shard_S, tier)
        self.watch = EditWatch(name)
        self._streams = streams
        self._written: CopyHandle | None = None  # an edit on its way to the host
        self._gathered: CopyHandle | None = None  # the last copy to the device

    def acquire(self) -> Tensor:
        """Waits for copies of the shard: the host may write it."""
        for copy in (self._written, self._gathered):
            if copy is not None:
                copy.synchronize()
        self._written = self._gathered = None
        return self.shard_S

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """The current stream waits for the copy in the handle's ``wait``."""
        written, self._written = self._written, None
        if written is not None:
            written.wait_stream()
        copy = self._gathered = self._streams.h2d(self.shard_S, part_S)
        return gather_on_device(copy, comm, full_N, part_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        self.watch.begin(part_S)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Does not wait for the device."""
        if edited:
            self._written = self._streams.d2h(part_S, self.shard_S)
            self.watch.begin(part_S)
        else:
            self.watch.end(part_S)


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
