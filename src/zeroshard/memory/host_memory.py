"""Host memory that torch does not manage: aligned memory, files past the page cache, the heap's limits.

:func:`return_large_blocks` makes the C library return large freed blocks to the system. By default glibc
keeps freed blocks of up to 32 MB in its heap (the threshold grows with the size of freed blocks). Shards,
full units, gradients and logits of that size, freed between small activations, leave holes in which
nothing of their size fits, and the heap grows from step to step (ADR 0008). If the user chose one of both
limits in the environment (``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES``),
both stay as they are.

Compiled code, disk threads and kernels that are launched without torch's dispatcher call
:func:`host_access` and :func:`kernel_access`. In production these do nothing.
:mod:`zeroshard_testing.streams` listens, and so proves that such code comes after all that it depends on.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.core.files import PAGE_NBYTES, reason
from zeroshard.errors import DiskError

_view: Callable[[int, int, int], memoryview] = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
)(("PyMemoryView_FromMemory", ctypes.pythonapi))
_PYBUF_WRITE = 0x200

_ZEROS_NBYTES = 8 << 20

aligned_listeners: list[Callable[[Tensor], None]] = []
"""Called with each tensor of :func:`aligned_bytes`, whose memory torch did not allocate. Empty in
production."""

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}


def memory_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address. The caller must keep the memory alive."""
    return _view(address, nbytes, _PYBUF_WRITE)


def round_to_page(nbytes: int) -> int:
    """The smallest multiple of 4096 that is at least ``nbytes``."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def aligned_bytes(nbytes: int) -> Tensor:
    """A zeroed, page-aligned uint8 tensor ``[nbytes]``. Its anonymous memory is freed with the tensor."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, round_to_page(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(
        OSError
    ):  # huge pages, if the kernel has them: 2.5 times the bandwidth of 4 KiB pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
    for listener in aligned_listeners:
        listener(tensor)
    return tensor


def open_unnamed(directory: str) -> tuple[int, str]:
    """Open a new file that is in no directory. Returns it and the kernel's name for it (as in ``lsof``).

    Raises:
        DiskError: no file can be made in ``directory``.
    """
    try:
        with suppress(FileExistsError):  # if it is not a directory, open() raises with the reason
            os.mkdir(directory)
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            name = os.path.join(directory, f".zeroshard-{os.getpid()}-{secrets.token_hex(8)}.swap")
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            os.unlink(name)
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = f" Its parent {os.path.dirname(directory)} does not exist either."
        raise DiskError(
            f"no swap file can be created in {directory}: {reason(error)}.{hint} Give as "
            "nvme_path a directory on a local disk that this user may write to."
        ) from error
    return fd, os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve blocks of the file. Writes zeros where the file system cannot reserve."""
    try:
        os.posix_fallocate(fd, offset, nbytes)
    except OSError as error:
        if error.errno not in NO_FALLOCATE:
            raise
        zeros = aligned_bytes(min(_ZEROS_NBYTES, nbytes))
        memory = memory_at(zeros.data_ptr(), zeros.nbytes)
        done = 0
        while done < nbytes:
            part = memory[: nbytes - done]
            done += os.pwritev(fd, [part], offset + done)


LARGE_NBYTES = 16 << 20
"""Blocks from this size on get pages of their own, on CPU ranks."""

LARGE_OFFLOADED_NBYTES = 4 << 20
"""The same where state is offloaded on CPU ranks, to save as much as possible."""

KEPT_NBYTES = 64 << 20
"""Free memory at the end of the heap that stays, so that small activations cost no page faults."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h; setting one stops both from growing

_set_nbytes: set[int] = set()
"""Thresholds that engines of this process have set. The smallest one holds."""


def return_large_blocks(*, offloaded: bool) -> bool:
    """Return large blocks of this process to the system when they are freed, from now on.

    This holds for the whole process, since the C library has one heap. ``offloaded``: state is offloaded
    on CPU ranks. Returns whether it worked (another allocator has no such call).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _user_chose():
        return False
    _set_nbytes.add(LARGE_OFFLOADED_NBYTES if offloaded else LARGE_NBYTES)
    worked = mallopt(_M_MMAP_THRESHOLD, min(_set_nbytes)) == 1
    if LARGE_OFFLOADED_NBYTES not in _set_nbytes:
        worked &= mallopt(_M_TRIM_THRESHOLD, KEPT_NBYTES) == 1
    return bool(worked)


def _user_chose() -> bool:
    tuned = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{limit}_THRESHOLD_" in os.environ
        or f"glibc.malloc.{limit.lower()}_threshold" in tuned
        for limit in ("MMAP", "TRIM")
    )


Listener = Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]
"""Called with the tensors read, the tensors written, and whether a device does it."""

listeners: list[Listener] = []
"""Empty in production. A hot path looks here before it calls, and so pays nothing."""


def host_access(reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
    """The calling thread reads and writes host memory now, until it returns to its caller."""
    for listener in listeners:
        listener(reads, writes, False)


def kernel_access(reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
    """A kernel that reads and writes device memory was queued on the current stream."""
    for listener in listeners:
        listener(reads, writes, True)


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener`` at each access. Returns a function that ends this."""
    listeners.append(listener)
    return lambda: listeners.remove(listener)
