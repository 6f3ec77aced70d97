"""Free space of a directory, and the text of a failed system call."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from zeroshard.errors import DiskError


def free_nbytes(directory: str | Path | int) -> int:
    """Bytes that this user may still write below ``directory``, or on the file system of an open file.

    Raises:
        DiskError: the file system does not report them.
    """
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise DiskError(f"free space of {directory} cannot be read: {reason(error)}.") from error
    return found.f_bavail * found.f_frsize


def reason(error: OSError) -> str:
    name = errno.errorcode.get(error.errno or 0, "no number")
    return f"{error.strerror} ({name})"
