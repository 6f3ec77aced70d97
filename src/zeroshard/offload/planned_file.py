"""The swap file of a simulated rank: what a real one would reserve, move and hold, without a file.

Fake tensors have no bytes, so a transfer has ended when it is submitted. Stores and pager are those of a
real rank, and what they hold does not depend on when a transfer ends: they give memory back in the order
of their own calls.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zeroshard.core.ledger import Ledger
from zeroshard.memory.host_memory import PAGE_NBYTES, round_to_page
from zeroshard.offload.swap_file import BLOCK_NBYTES, THREADS, Extent, SwapFile, Transfer

_ENDED = threading.Event()
_ENDED.set()


class PlannedTransfer(Transfer):
    """A transfer that has ended."""

    def __init__(self, nbytes: int, *, writes: bool) -> None:
        self.nbytes = nbytes
        self.writes = writes
        self.began_s = self.ended_s = 0.0
        self._ended = _ENDED
        self._failure = None


class PlannedSwapFile(SwapFile):
    """Counts as :class:`SwapFile` does on a disk with direct I/O.

    ``device``: where fake tensors are made that stand for host memory; a simulated rank has one memory.
    """

    direct = True

    def __init__(self, directory: str, *, device: torch.device, ledger: Ledger) -> None:
        self.directory = self.path = directory
        self.block_nbytes = BLOCK_NBYTES
        self.read_nbytes = self.written_nbytes = self.reserved_nbytes = 0
        self._device = device
        self._ledger = ledger
        self._bounces: list[Tensor] = []

    def memory(self, nbytes: int) -> Tensor:
        """See :class:`SwapFile`."""
        whole = torch.empty(round_to_page(nbytes), dtype=torch.uint8, device=self._device)
        return whole[:nbytes]

    def reserve(self, nbytes: int) -> Extent:
        """See :class:`SwapFile`. Nothing is reserved."""
        extent = Extent(self.reserved_nbytes, round_to_page(nbytes))
        self.reserved_nbytes += extent.nbytes
        return extent

    def flush(self) -> None:
        """See :class:`SwapFile`."""

    def drain(self) -> None:
        """See :class:`SwapFile`."""

    def close(self) -> None:
        """See :class:`SwapFile`."""
        self._bounces = []
        self._report_bounces()

    def _submit(
        self,
        extent: Extent,
        memory: Tensor,
        nbytes: int | None,
        after: Transfer | None,
        *,
        writes: bool,
    ) -> Transfer:
        nbytes = memory.nbytes if nbytes is None else nbytes
        # Fakes have no address. Of what is moved only :meth:`memory` is aligned, and only that is bytes.
        is_aligned = memory.dtype is torch.uint8 and not nbytes % PAGE_NBYTES
        if nbytes and not is_aligned and not self._bounces:
            self._make_bounces(THREADS)
        if writes:
            self.written_nbytes += round_to_page(nbytes)
        else:
            self.read_nbytes += round_to_page(nbytes)
        return PlannedTransfer(nbytes, writes=writes)
