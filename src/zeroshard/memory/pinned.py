"""Pinned host memory, which a GPU copies to and from at full speed.

[Note: one arena] An allocator that pins block by block rounds each block up, in the worst case to a power
of two, and pinned memory can never be swapped out. Here the caller knows every size in advance, so there
is one mapping of the exact size, registered once.

[Note: shared mapping] The mapping is anonymous and shared. The kernel would copy a private one after
``fork``: page by page as the parent updates it, and all at once if it is registered. With two data-loader
workers the optimizer state would be in memory three times.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.memory.pages import round_to_page

logger = logging.getLogger("zeroshard")

ALIGNMENT_NBYTES = 64
"""Alignment of every tensor: a cache line, which vectorised kernels prefer."""


def slot_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the arena that ``take(numel, dtype)`` uses. The arena's size is the sum of these.

    >>> slot_nbytes(17, torch.float32)
    128
    """
    return -(-numel * dtype.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


class HostArena:
    """``nbytes`` of zeroed host memory, given out in parts that are never returned.

    ``pin``: page-lock it if CUDA is available; ``is_pinned`` tells whether that worked. If the driver
    refuses, copies are slower and a warning gives the reason. The memory is freed with the last tensor in
    it; page-locking ends with ``close()`` or with the arena.
    """

    def __init__(self, nbytes: int, pin: bool) -> None:
        self.nbytes = round_to_page(nbytes)
        self.used_nbytes = 0
        self.is_pinned = False
        self._memory: mmap.mmap | None = None
        self._unregister: weakref.finalize[..., HostArena] | None = None
        if self.nbytes:
            flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
            self._memory = mmap.mmap(-1, self.nbytes, flags=flags)
            with suppress(OSError):  # huge pages mean fewer page faults, where the system has them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            if pin and torch.cuda.is_available():
                self._register(self._memory)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``[numel]`` elements of the arena: zeroed and 64-byte aligned. Allocates nothing."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        begin, nbytes = self.used_nbytes, slot_nbytes(numel, dtype)
        assert begin + nbytes <= self.nbytes, (
            f"{nbytes} bytes asked for, {self.nbytes - begin} of {self.nbytes} left in the arena"
        )
        assert self._memory is not None, "the arena is closed"
        self.used_nbytes += nbytes
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=begin)

    def close(self) -> None:
        """End page-locking. Tensors stay valid. No copy between them and a GPU may be in flight."""
        if self._unregister is not None:
            self._unregister()
        self.is_pinned = False
        self._memory = None

    def _register(self, memory: mmap.mmap) -> None:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        cudart: Any = torch.cuda.cudart()
        code = cudart.cudaHostRegister(address, self.nbytes, 0)
        if int(code):
            _forget_error()
            logger.warning(
                "%.2f GiB of host memory could not be page-locked: cudaHostRegister gave error %d "
                "(%s). Copies to and from the GPU will be slower and will not overlap with "
                "computation. Raise the limit of locked memory (ulimit -l unlimited, in a container "
                '--ulimit memlock=-1), or write "pin_memory": false to do without.',
                *(self.nbytes / 2**30, int(code), cudart.cudaGetErrorString(code)),
            )
            return
        self.is_pinned = True
        # ``memory`` is an argument, so it cannot be unmapped before it is unregistered
        self._unregister = weakref.finalize(self, _unregister, cudart, address, memory)


def _unregister(cudart: Any, address: int, memory: mmap.mmap) -> None:
    del memory
    code = cudart.cudaHostUnregister(address)
    if int(code):
        _forget_error()
        logger.warning("cudaHostUnregister gave error %d for the host arena", int(code))


def _forget_error() -> None:
    """Clear the error code of a failed CUDA call, or the next kernel would report it."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
