"""Says on what kind of file system a directory is."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

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
