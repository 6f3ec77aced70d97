"""Stores a unit's reduced gradient on disk between its reduction and its update.

It is written while backward goes on and read ahead of its use (ADR 0008). Letters as in
:mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError
from zeroshard.offload.shard_store import WritesInFlight
from zeroshard.offload.swap_file import Extent, SwapFile, Transfer


class GradStore(Protocol):
    """Where a unit's reduced gradient is stored until its update, if not in the gradient buffer.

    ``every_backward``: it is stored after each backward, not only when the gradient of a step is
    complete.
    """

    every_backward: bool

    def write(self, values_S: Tensor) -> None:
        """Start storing the gradient, in place of what is stored. It may not be changed any more."""

    def prefetch(self) -> None:
        """Start reading the gradient back."""

    def acquire(self) -> Tensor:
        """The gradient, to be changed or used up."""

    def peek(self) -> Tensor:
        """The gradient, to be read only. It stays stored."""

    def free(self) -> None:
        """Drop the gradient, which is used up."""


class PlannedGradStore:
    """A unit's reduced gradient in the host memory of a GPU, in a plan: it takes no memory of its own.

    ``memory()``: the copy buffers, uint8 and fake. All gradients begin where they begin, since fake
    tensors have no values.
    """

    every_backward = False

    def __init__(self, memory: Callable[[], Tensor]) -> None:
        self._memory = memory
        self._values_S: Tensor | None = None

    def write(self, values_S: Tensor) -> None:
        """See :class:`GradStore`."""
        self._values_S = self._memory()[: values_S.nbytes].view(values_S.dtype)

    def prefetch(self) -> None:
        """Does nothing: the update uses the gradient in host memory."""

    def acquire(self) -> Tensor:
        """The gradient ``[S]``, in host memory."""
        assert self._values_S is not None
        return self._values_S

    peek = acquire

    def free(self) -> None:
        """Drop the gradient."""
        self._values_S = None


class DiskGradStore:
    """One unit's reduced gradient in a file.

    It has memory only around transfers. A written gradient keeps its memory until :meth:`finish`, which
    ``writes`` calls when too many newer writes are in flight. A read one has memory from :meth:`prefetch`
    to :meth:`free`. ``nbytes`` are reserved in the file. A sum in a wider dtype than planned gets a
    larger extent.
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
        self._nbytes = 0  # of the stored gradient
        self._dtype = torch.float32
        self._values_S: Tensor | None = None  # the gradient, while it has memory
        self._wanted = False  # was prefetched; otherwise the memory is freed after the write
        self._read: Transfer | None = None
        self._write: Transfer | None = None

    def write(self, values_S: Tensor) -> None:
        """Start writing a new gradient. ``values_S`` may not be changed any more.

        If the write fails, the next use of this store raises, or a later :meth:`write` of any unit.
        """
        self.free()  # waits: two transfers of one extent would race
        if values_S.nbytes > self._extent.nbytes:
            self._extent = self._file.reserve(values_S.nbytes)
        self._write = self._file.write(self._extent, values_S)
        self._values_S, self._nbytes, self._dtype = values_S, values_S.nbytes, values_S.dtype
        self._report()
        self._writes.add(self)

    def finish(self) -> None:
        """Wait until the gradient is in the file. Its memory is freed unless it was prefetched."""
        if self._write is not None:
            self._write.wait()
            self._write = None
            if not self._wanted:
                self._values_S = None
            self._report()

    def prefetch(self) -> None:
        """Start reading the gradient back. If its write has not ended, only its memory is kept."""
        self._wanted = True
        if self._values_S is None:
            self._values_S = self._file.memory(self._nbytes).view(self._dtype)
            self._read = self._file.read(self._extent, self._values_S)
            self._report()

    def acquire(self) -> Tensor:
        """The gradient ``[S]``, writable until :meth:`free`.

        Raises:
            DiskError: it cannot be written or read.
        """
        self.prefetch()
        self.finish()
        read, self._read = self._read, None
        if read is not None:
            try:
                read.wait()
            except DiskError:
                self._values_S = None  # its contents are not the gradient
                self._report()
                raise
        assert self._values_S is not None
        return self._values_S

    def peek(self) -> Tensor:
        """The gradient ``[S]``, to be read only. It stays stored."""
        if self._values_S is not None:
            return self.acquire()
        values_S = self._file.memory(self._nbytes).view(self._dtype)
        self._file.read(self._extent, values_S).wait()
        return values_S

    def free(self) -> None:
        """Drop the gradient, after waiting for its transfers."""
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
