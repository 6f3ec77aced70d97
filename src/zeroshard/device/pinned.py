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
import os
import resource
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.core.files import PAGE_NBYTES
from zeroshard.device.accelerator import forget_error, host_registrar
from zeroshard.device.choice import ops_of
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.memory.host_memory import aligned_bytes, round_to_page

logger = logging.getLogger("zeroshard")

_PIECE_NBYTES = 64 << 20  # what one core touches at a time

ALIGNMENT_NBYTES = 64
"""Alignment of every tensor: a cache line, which vectorised kernels prefer."""


def slot_nbytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of the arena that ``take(numel, dtype)`` uses. The arena's size is the sum of these.

    >>> slot_nbytes(17, torch.float32)
    128
    """
    return -(-numel * dtype.itemsize // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


_KEPT_LOCKED: list[mmap.mmap | None] = []


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
            if pin and (runtime := host_registrar()) is not None:
                self._register(self._memory, runtime)

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

    def keep_locked(self) -> None:
        """Leave the memory page-locked until the process ends: a copy in flight may never end."""
        if self._unregister is not None and self._unregister.detach() is not None:
            _KEPT_LOCKED.append(self._memory)

    def _register(self, memory: mmap.mmap, runtime: Any) -> None:
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        touch_pages(torch.frombuffer(memory, dtype=torch.uint8))
        code = runtime.cudaHostRegister(address, self.nbytes, 0)
        if int(code):
            forget_error()
            logger.warning(
                "%s",
                refusal_text(
                    self.nbytes, int(code), runtime.cudaGetErrorString(code), lock_limits()
                ),
            )
            return
        self.is_pinned = True
        # ``memory`` is an argument, so it cannot be unmapped before it is unregistered
        self._unregister = weakref.finalize(self, _unregister, runtime, address, memory)


def host_bytes(nbytes: int, device: torch.device) -> Tensor:
    """Host memory uint8 ``[nbytes]`` that ``device`` copies from and to at full speed.

    It begins at a page, is of the exact size, and is freed with its last tensor. No copy may be in flight
    then.
    """
    if not ops_of(device).is_async:
        return aligned_bytes(nbytes)
    arena = HostArena(nbytes, pin=True)
    memory = arena.take(nbytes, torch.uint8)
    weakref.finalize(memory.untyped_storage(), arena.close)
    return memory


def touch_pages(memory: Tensor) -> None:
    """Write to each page of uint8 ``[n]``, on all cores of this process.

    The kernel then allocates and clears the pages on these cores. The driver would let one core do it.
    """
    pieces = memory.split(_PIECE_NBYTES)
    if len(pieces) == 1:
        _touch(memory)
        return
    with ThreadPoolExecutor(min(len(pieces), cores())) as threads:
        for done in [threads.submit(_touch, piece) for piece in pieces]:
            done.result()


def _touch(piece: Tensor) -> None:
    piece[::PAGE_NBYTES].zero_()


def cores() -> int:
    """The number of cores that this process may use."""
    has_mask = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_mask else os.cpu_count() or 1


def lock_limits() -> str:
    """The limits that may keep memory from being locked, in words."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"
    return "; ".join(filter(None, (f"ulimit -l {words}", host_limits().in_words())))


def refusal_text(nbytes: int, code: int, reason: str, limits: str) -> str:
    """The warning when the driver refuses to lock ``nbytes``. ``limits``: of :func:`lock_limits`."""
    return (
        f"{nbytes} bytes ({gib(nbytes)}) of host memory could not be page-locked: cudaHostRegister gave "
        f"error {code} ({reason}). Limits here: {limits}. Copies to and from the GPU will be slower and "
        "will not overlap with computation. Raise the limit of locked memory (ulimit -l unlimited, in a "
        'container --ulimit memlock=-1) or of the cgroup, or write "pin_memory": false to use memory '
        "that is not page-locked."
    )


def _unregister(runtime: Any, address: int, memory: mmap.mmap) -> None:
    del memory
    code = runtime.cudaHostUnregister(address)
    if int(code):
        forget_error()
        logger.warning("cudaHostUnregister gave error %d for the host arena", int(code))
