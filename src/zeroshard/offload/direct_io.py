"""How is a file made that no directory lists, with blocks that nobody can take away?

And how is the page-aligned memory made that it is filled from?
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.errors import DiskError

PAGE_NBYTES = 4096
_ZEROS_NBYTES = 8 << 20

_NO_TMPFILE = {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT}
NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}

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


def free_nbytes(directory: str | Path | int) -> int:
    """Bytes that this user may still write below ``directory``, or where an open file is.

    Raises ``DiskError``.
    """
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise DiskError(f"free space of {directory} cannot be read: {reason(error)}.") from error
    return found.f_bavail * found.f_frsize


def open_unnamed(directory: str) -> tuple[int, str]:
    """A new file that no directory lists, and what the kernel calls it (``lsof`` shows this)."""
    try:
        with suppress(FileExistsError):  # and if it is no directory, opening says so
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
            f"no swap file can be made in {directory}: {reason(error)}.{hint} Name a directory on a "
            "local disk that this user may write to as nvme_path."
        ) from error
    return fd, os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")


def turn_direct(fd: int) -> bool:
    """Switch ``O_DIRECT`` on; False if the file system refuses it, at once or at the first transfer."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    page = aligned_bytes(PAGE_NBYTES)
    memory = memory_at(page.data_ptr(), PAGE_NBYTES)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(fd, [memory], 0)
        os.preadv(fd, [memory], 0)
        direct = True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        direct = False
    os.ftruncate(fd, 0)
    return direct


def allocate(fd: int, offset: int, nbytes: int) -> None:
    """Reserve blocks; written as zeros where the file system cannot reserve."""
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


def reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "no number")
    return f"{error.strerror} ({name})"
