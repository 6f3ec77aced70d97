"""How do tensors leave the device for a while, and come back as the same tensors?

Their bytes are copied to host memory and their storages released; later the storages are allocated and
filled again. So every view of them stays valid, and means nothing in between
(:mod:`zeroshard.memory.storage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroshard.memory import storage
from zeroshard.memory.pinned import HostArena, slot_nbytes


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """All bytes of each storage behind the tensors, as uint8 ``[n]``. Storages that are used together
    come once, empty ones not at all."""
    storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]


class HostBuffer:
    """Host memory for what leaves together, page-locked if ``pin`` and where there is CUDA.

    ``leaving``: byte tensors as :func:`distinct` makes them; their sum is the size. Copies run in the
    order of the device's current stream, which is not waited for.
    """

    def __init__(self, leaving: Sequence[Tensor], *, pin: bool) -> None:
        self.nbytes = _needed_nbytes(leaving)
        self._arena = HostArena(self.nbytes, pin)

    @property
    def is_pinned(self) -> bool:
        return self._arena.is_pinned

    def clear_for(self, leaving: Sequence[Tensor]) -> bool:
        """All that is in it may be overwritten. Is it large enough for these?"""
        self._arena.used_nbytes = 0
        return _needed_nbytes(leaving) <= self.nbytes

    def copy_in(self, here: Tensor) -> Tensor:
        """A copy of the bytes in this room, with a storage of its own."""
        if here.is_cuda:
            here.record_stream(torch.cuda.current_stream(here.device))
        there = self._arena.take(here.numel(), torch.uint8)
        return there.copy_(here, non_blocking=self.is_pinned)

    def close(self) -> None:
        """End page-locking; no copy may be under way. Memory goes with the last tensor in it."""
        self._arena.close()


def _needed_nbytes(leaving: Iterable[Tensor]) -> int:
    return sum(slot_nbytes(here.numel(), torch.uint8) for here in leaving)


class SwappedStorages:
    """Storages whose bytes are in a room."""

    def __init__(self) -> None:
        self._packed: list[tuple[Tensor, Tensor]] = []

    def swap_out(self, here: Tensor, room: HostBuffer) -> None:
        """Copy the bytes and release their storage. One that cannot be resized stays as it is: on CPU
        ranks a numpy array may look at it, and its memory is the host's already."""
        if here.untyped_storage().resizable():
            self._packed.append((here, room.copy_in(here)))
            storage.release(here)

    def swap_in(self) -> None:
        """Give every storage its bytes back. If the device has no room, the others stay packed."""
        while self._packed:
            here, there = self._packed[-1]
            storage.allocate(here)
            here.copy_(there, non_blocking=True)
            self._packed.pop()
