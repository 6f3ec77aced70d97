"""Page-aligned host memory: the form that disks and GPU copies take without another copy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

PAGE_NBYTES = 4096

_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_PYBUF_WRITE = 0x200


def memory_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address, which the caller keeps alive."""
    return _view(address, nbytes, _PYBUF_WRITE)


def round_to_page(nbytes: int) -> int:
    """The next multiple of 4096."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def aligned_bytes(nbytes: int) -> Tensor:
    """uint8 ``[nbytes]``, page-aligned, zero, on anonymous memory that is freed with the tensor."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, round_to_page(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(
        OSError
    ):  # huge pages (not every kernel has them): 2.5 times the bandwidth of 4 KiB
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
