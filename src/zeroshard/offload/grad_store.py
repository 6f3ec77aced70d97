"""Stores a unit's reduced gradient between its reduction and its update: on disk, or in host memory.

To disk it is written while backward goes on, and it is read ahead of its use (ADR 0008). Letters as in
:mod:`zeroshard.zero.unit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.errors import DiskError

if TYPE_CHECKING:
    from zeroshard.offload.host_chunk import HostChunk
    from zeroshard.offload.swap_file import Extent, SwapFile, Transfer

WRITES_IN_FLIGHT = 2
"""Writes of shards, or of gradients, in flight at a time. More would hold memory and gain no speed."""


class GradStore(Protocol):
    """Where a unit's reduced gradient is stored until its update, if not in the gradient buffer.

    ``every_backward``: it is stored after each backward, not only when the gradient of a step is
    complete.
    """

    every_backward: bool = False

    def write(self, values_S: Tensor) -> None:
        """Start storing the gradient, in place of what is stored. It may not be changed any more."""

    def prefetch(self) -> None:
        """Start reading the gradient back, if it is not in memory."""

    def acquire(self) -> Tensor:
        """The gradient, to be changed or used up."""

    def peek(self) -> Tensor:
        """The gradient, to be read only. It stays stored."""

    def free(self) -> None:
        """Drop the gradient, which is used up."""


def nothing() -> None:
    """Updates in host memory wait for the step."""


class HostGradStore(GradStore):
    """A unit's reduced gradient in host memory, where its update runs, from the end of its reduction.

    ``parts``: slices of the gradient and their chunks, ``numel`` elements in total. ``before()`` is
    called before the chunks' gradient buffers are overwritten, ``after()`` when a complete gradient is on
    its way, and ``stale()`` when that is taken out or dropped, which comes before another one.
    """

    def __init__(
        self,
        parts: Sequence[tuple[slice, HostChunk]],
        *,
        numel: int,
        before: Callable[[], object],
        after: Callable[[], object] = nothing,
        stale: Callable[[], object] = nothing,
    ) -> None:
        self._parts = parts
        self._numel = numel
        self._before, self._after, self._stale = before, after, stale
        self._like: Tensor | None = None  # empty, with dtype and device of the stored gradient

    def write(self, values_R: Tensor) -> None:
        self._before()
        self._like = values_R.new_empty(0)
        for part, host_chunk in self._parts:
            host_chunk.send_gradient(values_R[part])
        self._after()

    def prefetch(self) -> None:
        """Does nothing: the update uses the gradient in host memory."""

    def acquire(self) -> Tensor:
        """A copy on the device, to be changed."""
        self._stale()
        return self.peek()

    def peek(self) -> Tensor:
        """A copy on the device."""
        assert self._like is not None
        back_R = self._like.new_empty(self._numel)
        for part, host_chunk in self._parts:
            host_chunk.fetch_gradient(back_R[part])
        return back_R

    def free(self) -> None:
        """The memory is reused for the next gradient."""
        self._stale()


class PlannedGradStore(GradStore):
    """A unit's reduced gradient in the host memory of a GPU, in a plan: it takes no memory of its own.

    ``memory()``: the copy buffers, uint8 and fake. All gradients begin where they begin, since fake
    tensors have no values.
    """

    def __init__(self, memory: Callable[[], Tensor]) -> None:
        self._memory = memory
        self._values_S: Tensor | None = None

    def write(self, values_S: Tensor) -> None:
        self._values_S = self._memory()[: values_S.nbytes].view(values_S.dtype)

    def prefetch(self) -> None:
        """Does nothing, as in :class:`HostGradStore`."""

    def acquire(self) -> Tensor:
        """The gradient ``[S]``, in host memory."""
        assert self._values_S is not None
        return self._values_S

    peek = acquire

    def free(self) -> None:
        self._values_S = None


class WritesInFlight:
    """The writes in flight of one kind, oldest first. Bounds the memory that they hold."""

    def __init__(self) -> None:
        self._leaving: deque[Callable[[], None]] = deque()

    def add(self, finish: Callable[[], None]) -> None:
        """Add a write, and what waits for its end and frees its memory if that is not in use.

        While there are more than ``WRITES_IN_FLIGHT``, wait for the oldest.
        """
        self._leaving.append(finish)
        while len(self._leaving) > WRITES_IN_FLIGHT:
            self._leaving.popleft()()


class DiskGradStore(GradStore):
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
        self._writes.add(self.finish)

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
