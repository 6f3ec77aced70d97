"""Can this directory hold the state, and how fast would it serve it?"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.core.files import free_nbytes
from zeroshard.errors import DiskError
from zeroshard.memory.pages import PAGE_NBYTES, aligned_bytes
from zeroshard.offload.swap_file import BLOCK_NBYTES, Extent, SwapFile

__all__ = [
    "Speed",
    "check",
    "filesystem_of",
    "forecast",
    "free_below",
    "free_nbytes",
    "measure",
    "warning",
]

_PATIENCE_S = 0.25  # for each direction; the round that crosses it still ends
_FIRST_ROUND_NBYTES = 1 << 20

_IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb3", "smbfs", "wekafs",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured bandwidth in bytes per second, each direction alone."""

    read_Bps: float
    write_Bps: float
    direct: bool

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "through the page cache, O_DIRECT is refused"
        return (
            f"reads {self.read_Bps / 1e9:.2f} GB/s, writes {self.write_Bps / 1e9:.2f} GB/s ({how})"
        )


def check(directory: str | Path, wanted_nbytes: int, *, free: int | None = None) -> None:
    """Raise ``DiskError`` if what all ranks of this host want to keep below ``directory`` does not fit.

    Made before any rank reserves: what is reserved is no longer free. ``free``: bytes, if they were
    looked up already, perhaps on another host.
    """
    free = free_below(directory) if free is None else free
    if wanted_nbytes > free:
        raise DiskError(
            f"{directory} cannot hold the training state: the ranks of this host need {wanted_nbytes} "
            f"bytes ({wanted_nbytes / 1e9:.2f} GB) and {free} ({free / 1e9:.2f} GB) are free, "
            f"{wanted_nbytes - free} too few. Free space, name another nvme_path, let less rest on disk "
            "(max_in_cpu, or device 'cpu'), or use more hosts."
        )


def free_below(directory: str | Path) -> int:
    """Free bytes where ``directory`` is, or will be made. Raises ``DiskError``."""
    return free_nbytes(_existing(directory))


def measure(
    directory: str | Path, nbytes: int = 256 << 20, block_nbytes: int = BLOCK_NBYTES
) -> Speed:
    """Write and read up to ``nbytes`` (less on a slow disk, and never over half of what is free).

    Takes about a second at most: rounds of doubling size, of which the last one counts. What a page
    cache would hide is not hidden: data reach the device, and are read from it. Raises ``DiskError``.
    """
    file = SwapFile(directory, block_nbytes=block_nbytes)
    try:
        nbytes = min(nbytes, free_nbytes(directory) // 2)
        room = file.reserve(max(PAGE_NBYTES, nbytes // PAGE_NBYTES * PAGE_NBYTES))
        block = aligned_bytes(block_nbytes)
        block.random_()  # nothing that a file system compresses
        into = [aligned_bytes(block_nbytes) for _ in range(4)]

        def write(round_: Extent) -> None:
            parts = _split(round_, block_nbytes)
            for transfer in [file.write(p, block, nbytes=p.nbytes) for p in parts]:
                transfer.wait()
            file.flush()

        def read(round_: Extent) -> None:
            parts = _split(round_, block_nbytes)
            moving = [
                file.read(p, into[i % len(into)], nbytes=p.nbytes) for i, p in enumerate(parts)
            ]
            for transfer in moving:
                transfer.wait()

        write_Bps, written = _last_round(write, room)
        read_Bps, _ = _last_round(read, Extent(room.offset, written))
        return Speed(read_Bps, write_Bps, file.direct)
    finally:
        file.close()


def forecast(read_nbytes: int, write_nbytes: int, speed: Speed, ranks_sharing: int = 1) -> float:
    """Seconds that the disk needs for one step of one rank when ``ranks_sharing`` use it at once.

    Reads and writes share the device: measured together they take as long as one after the other.
    """
    return ranks_sharing * (read_nbytes / speed.read_Bps + write_nbytes / speed.write_Bps)


def warning(directory: str | Path) -> str | None:
    """What is wrong with resting state there although it works; None if nothing is."""
    kind = filesystem_of(_existing(directory), Path("/proc/self/mounts").read_text())
    if kind in _IN_MEMORY:
        return (
            f"{directory} is a {kind}: what is kept there is kept in this host's memory, and offloading "
            "to it saves none. Name a directory on a disk as nvme_path."
        )
    if kind in _NETWORK or (kind.startswith("fuse.") and kind != "fuse.overlayfs"):
        return (
            f"{directory} is a network file system ({kind}): every step moves the whole optimizer state "
            "over it, and other users share its speed. Name a directory on a local disk as nvme_path."
        )
    return None


def filesystem_of(directory: str | Path, mounts: str) -> str:
    """Type of the file system that holds ``directory``; ``mounts`` is the text of ``/proc/mounts``."""
    place = os.path.realpath(directory)
    found, kind = "", "unknown"
    for line in mounts.splitlines():
        _, point, fstype, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), point)
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found):  # the deepest, and of equals the last one mounted
            found, kind = point, fstype
    return kind


def _existing(directory: str | Path) -> Path:
    """The directory, or its parent where it has yet to be made."""
    path = Path(os.path.expanduser(directory))
    return path if path.exists() else path.absolute().parent


def _split(extent: Extent, nbytes: int) -> list[Extent]:
    return [
        Extent(extent.offset + at, min(nbytes, extent.nbytes - at))
        for at in range(0, extent.nbytes, nbytes)
    ]


def _last_round(move: Callable[[Extent], None], room: Extent) -> tuple[float, int]:
    """Bytes per second of the last round, and the bytes moved in all."""
    done, size, spent_s, rate = 0, _FIRST_ROUND_NBYTES, 0.0, 0.0
    while done < room.nbytes and spent_s < _PATIENCE_S:
        left = room.nbytes - done
        part = Extent(room.offset + done, left if left < 2 * size else size)
        begin_s = time.perf_counter()
        move(part)
        took_s = time.perf_counter() - begin_s
        rate = part.nbytes / max(took_s, 1e-9)
        done, size, spent_s = done + part.nbytes, size * 2, spent_s + took_s
    return rate, done
