"""How does a reduced gradient wait on disk for its update?

It is written behind backward and read back ahead of its use. Letters as in :mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError
from zeroshard.offload.shard_store import WritesInFlight
from zeroshard.offload.swap_file import Extent, SwapFile, Transfer, aligned_bytes


class GradStore(Protocol):
    """Where a unit's reduced gradient waits for its update, if that is not where it was reduced.

    ``every_backward``: it goes there after each backward, not only when the gradient of a step is
    complete.
    """

    every_backward: bool

    def write(self, values_S: Tensor) -> None:
        """Start it on its way. It may not be written to any more, and replaces what is there."""

    def prefetch(self) -> None:
        """Begin to bring it back."""

    def acquire(self) -> Tensor:
        """The gradient, for whoever changes it or uses it up."""

    def peek(self) -> Tensor:
        """The gradient, to be read and dropped: it goes on resting there."""

    def free(self) -> None:
        """It is used up."""


class DiskGradStore:
    """One unit's reduced gradient in a file.

    Its memory exists only during transfers: outward until the write has ended and another gradient
    needs its place in ``writes``, inward from :meth:`prefetch` to :meth:`free`. ``nbytes`` are
    reserved. A sum of a wider dtype than was planned gets another extent.
    """

    every_backward = True

    def __init__(
        self, file: SwapFile, nbytes: int, writes: WritesInFlight, *, ledger: Ledger, name: str
    ) -> None:
        self._file = file
        self._extent: Extent = file.reserve(nbytes)
        self._writes = writes
        self._ledger = ledger
        self._name = name
        self._nbytes = 0  # of the gradient that rests here
        self._dtype = torch.float32
        self._values_S: Tensor | None = None  # in memory
        self._wanted = False  # by who fetched it; else its memory goes with the end of the write
        self._read: Transfer | None = None
        self._write: Transfer | None = None

    def write(self, values_S: Tensor) -> None:
        """Start the write of a new gradient; its errors surface at the next use, or in a later ``send``
        of any unit. Nobody may write to ``values_S`` any more."""
        self.free()  # two transfers of one extent would race
        if values_S.nbytes > self._extent.nbytes:
            self._extent = self._file.reserve(values_S.nbytes)
        self._write = self._file.write(self._extent, values_S)
        self._values_S, self._nbytes, self._dtype = values_S, values_S.nbytes, values_S.dtype
        self._report()
        self._writes.add(self)

    def finish(self) -> None:
        """Wait until it is in the file; the memory goes if nobody asked for it again."""
        if self._write is not None:
            self._write.wait()
            self._write = None
            if not self._wanted:
                self._values_S = None
            self._report()

    def prefetch(self) -> None:
        """Begin to bring it back. One that is still on its way out only stays."""
        self._wanted = True
        if self._values_S is None:
            self._values_S = aligned_bytes(self._nbytes).view(self._dtype)
            self._read = self._file.read(self._extent, self._values_S)
            self._report()

    def acquire(self) -> Tensor:
        """The gradient ``[S]``, writable until :meth:`forget`. Raises :class:`DiskError`."""
        self.prefetch()
        self.finish()
        read, self._read = self._read, None
        if read is not None:
            try:
                read.wait()
            except DiskError:
                self._values_S = None  # or the next reader would take what is there for it
                self._report()
                raise
        assert self._values_S is not None
        return self._values_S

    def peek(self) -> Tensor:
        """The same, to be read and dropped: it goes on resting here."""
        if self._values_S is not None:
            return self.acquire()
        values_S = aligned_bytes(self._nbytes).view(self._dtype)
        self._file.read(self._extent, values_S).wait()
        return values_S

    def free(self) -> None:
        """It is used up; what still moves is waited for."""
        for transfer in (self._read, self._write):
            if transfer is not None:
                transfer.join()
        self._read = self._write = self._values_S = None
        self._wanted, self._nbytes = False, 0
        self._report()

    def _report(self) -> None:
        here = self._values_S
        nbytes = 0 if here is None else here.untyped_storage().nbytes()
        self._ledger.hold("scratch", f"{self._name} (gradient)", nbytes, Tier.HOST)
        self._ledger.hold("gradients", self._name, self._nbytes, Tier.DISK)


class DiscardedGradStore:
    """Stands in for :class:`GradOnDisk` under fake tensors, which have no bytes to write."""

    every_backward = True

    def __init__(self, *, ledger: Ledger, name: str) -> None:
        self._ledger = ledger
        self._name = name
        self._values_S: Tensor | None = None

    def write(self, values_S: Tensor) -> None:
        """See :class:`GradOnDisk`."""
        self._values_S = values_S
        self._ledger.hold("gradients", self._name, values_S.nbytes, Tier.DISK)

    def prefetch(self) -> None:
        """See :class:`GradOnDisk`."""

    def acquire(self) -> Tensor:
        """See :class:`GradOnDisk`."""
        assert self._values_S is not None
        return self._values_S

    peek = acquire

    def free(self) -> None:
        """See :class:`GradOnDisk`."""
        self._values_S = None
        self._ledger.hold("gradients", self._name, 0, Tier.DISK)
