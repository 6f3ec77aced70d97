"""Free space and file system of a directory, files past the page cache, texts of failed system calls."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
from pathlib import Path
from typing import Literal

from zeroshard.errors import DiskError

PAGE_NBYTES = 4096


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


def turn_direct(fd: int) -> bool:
    """Switch ``O_DIRECT`` on for an empty file. False: it is refused, perhaps at the first transfer."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, PAGE_NBYTES) as page:
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwritev(fd, [page], 0)
            os.preadv(fd, [page], 0)
            direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            direct = False
    os.ftruncate(fd, 0)
    return direct


def for_this_user(path: str, flags: int) -> int:
    """An ``opener`` of files that no other user reads: names and lines of the program are inside."""
    return os.open(path, flags, 0o600)


def write_for_this_user(path: Path, content: str | bytes) -> None:
    """Write a file that no other user reads.

    Raises:
        OSError: it cannot be written.
    """
    with open(path, "wb", opener=for_this_user) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def is_mine(about: os.stat_result) -> bool:
    """Whether a file or directory belongs to this process's user; True where there are no users."""
    return not hasattr(os, "getuid") or about.st_uid == os.getuid()


_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip


def filesystem_of(directory: str | Path, mounts: str) -> str:
    """The type of the file system that holds ``directory``. ``mounts``: the text of ``/proc/mounts``."""
    place = os.path.realpath(directory)
    found, kind = "", "unknown"
    for line in mounts.splitlines():
        _, point, fstype, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), point)
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found):  # the deepest one; of equal ones the last mounted
            found, kind = point, fstype
    return kind


def medium_of(kind: str) -> Literal["memory", "network", "disk"]:
    """What a file system of this type stores files on.

    >>> [medium_of(kind) for kind in ("tmpfs", "wekafs", "fuse.sshfs", "fuse.overlayfs", "ext4")]
    ['memory', 'network', 'network', 'disk', 'disk']
    """
    if kind in _IN_MEMORY:
        return "memory"
    if kind in _NETWORK or (kind.startswith("fuse.") and kind != "fuse.overlayfs"):
        return "network"
    return "disk"
