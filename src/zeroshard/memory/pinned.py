"""Where does state rest in host memory, so that a GPU can copy it at full speed?

[Note: one arena] An allocator that pins block by block rounds each one up, to powers of two in the worst
case, and what is pinned can never be swapped. Here the caller knows every size beforehand: one mapping
of the exact size, registered once.

[Note: shared mapping] The mapping is anonymous and shared. A private one would be copied by ``fork``:
page by page as the parent updates it, and all at once where it is registered. With two data-loader
workers the optimizer state would be there three times.
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
"""Of every tensor: a cache line, and what vectorised kernels like."""


def slot_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes that ``take(numel, dtype)`` uses up; the sum over all of them is the arena's size.

    >>> slot_nbytes(17, torch.float32)
    128
    """
    return -(-numel * dtype.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


class HostArena:
    """``nbytes`` of zeroed host memory, handed out piece by piece and never taken back.

    ``pin``: page-lock it where there is CUDA; ``is_pinned`` says whether that worked. Refusal by the
    driver costs speed, not the run: a warning names the reason. Memory is freed when the last tensor on
    it is gone; page-locking ends with ``close()`` or with the arena itself.
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
            with suppress(OSError):  # fewer page faults where the system has huge shared pages
                self._memory.madvise(mmap.MADV_HUGEPAGE)
            if pin and torch.cuda.is_available():
                self._register(self._memory)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``[numel]`` of the arena: zeros, 64-byte aligned. Costs no allocation."""
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
        """End page-locking; tensors stay valid. No copy between them and a GPU may be under way."""
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
        # ``memory`` is an argument, so that it cannot be unmapped before it is unregistered
        self._unregister = weakref.finalize(self, _unregister, cudart, address, memory)


def _unregister(cudart: Any, address: int, memory: mmap.mmap) -> None:
    del memory
    code = cudart.cudaHostUnregister(address)
    if int(code):
        _forget_error()
        logger.warning("cudaHostUnregister gave error %d for the host arena", int(code))


def _forget_error() -> None:
    """The failed call leaves its code behind, and the next kernel would report it as its own."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
