"""Direct I/O: page-aligned host memory, and files that are read and written past the page cache."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from zeroshard.core.files import PAGE_NBYTES, reason, turn_direct
from zeroshard.errors import DiskError

__all__ = [
    "NO_FALLOCATE",
    "PAGE_NBYTES",
    "aligned_bytes",
    "aligned_listeners",
    "allocate",
    "memory_at",
    "open_unnamed",
    "round_to_page",
    "turn_direct",
]

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
