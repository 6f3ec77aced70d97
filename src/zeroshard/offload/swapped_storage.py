"""Moves tensors to host memory and back, so that they stay the same tensors.

Their bytes are copied to host memory and their storages are released. Later the storages are allocated
and filled again. So all views of them stay valid; between the two they must not be read
(:mod:`zeroshard.memory.storage`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroshard.device.choice import ops_of
from zeroshard.device.pinned import HostArena, slot_nbytes
from zeroshard.memory import storage


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of the tensors' storages, as uint8 ``[n]``: each storage once, empty ones not at all."""
    storages = {s._cdata: s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
    return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in storages.values()]


class HostBuffer:
    """Host memory for tensors that are moved together. Page-locked if ``pin`` and CUDA is available.

    ``leaving``: byte tensors from :func:`distinct`; the sum of their sizes is the buffer's size. Copies
    run in the order of the device's current stream, which is not waited for.
    """

    def __init__(self, leaving: Sequence[Tensor], *, pin: bool) -> None:
        self.nbytes = _needed_nbytes(leaving)
        self._arena = HostArena(self.nbytes, pin)

    @property
    def is_pinned(self) -> bool:
        return self._arena.is_pinned

    def clear_for(self, leaving: Sequence[Tensor]) -> bool:
        """Drop the contents. Returns whether the buffer is large enough for ``leaving``."""
        self._arena.used_nbytes = 0
        return _needed_nbytes(leaving) <= self.nbytes

    def copy_in(self, here: Tensor) -> Tensor:
        """A copy of the bytes in this buffer, with a storage of its own."""
        ops_of(here.device).record_use(here)
        there = self._arena.take(here.numel(), torch.uint8)
        return there.copy_(here, non_blocking=self.is_pinned)

    def close(self) -> None:
        """End page-locking. No copy may be in flight. Memory is freed with the last tensor in it."""
        self._arena.close()


def _needed_nbytes(leaving: Iterable[Tensor]) -> int:
    return sum(slot_nbytes(here.numel(), torch.uint8) for here in leaving)


class SwappedStorages:
    """Storages whose bytes are in a host buffer."""

    def __init__(self) -> None:
        self._packed: list[tuple[Tensor, Tensor]] = []

    def swap_out(self, here: Tensor, room: HostBuffer) -> None:
        """Copy the bytes and release their storage.

        A storage that cannot be resized stays as it is. That happens on CPU ranks, where a numpy array
        may share it and its memory is host memory anyway.
        """
        if here.untyped_storage().resizable():
            self._packed.append((here, room.copy_in(here)))
            storage.release(here)

    def swap_in(self) -> None:
        """Give every storage its bytes back. If the device has no space, the rest stay in host memory."""
        while self._packed:
            here, there = self._packed[-1]
            storage.allocate(here)
            here.copy_(there, non_blocking=True)
            self._packed.pop()
