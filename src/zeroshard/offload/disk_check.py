"""Checks whether a directory can hold the training state, and measures how fast it is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zeroshard.core.files import filesystem_of, free_nbytes, medium_of
from zeroshard.errors import DiskError
from zeroshard.memory.host_memory import PAGE_NBYTES, aligned_bytes
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

_PATIENCE_S = 0.25  # per direction; the round in which it is exceeded is finished
_FIRST_ROUND_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured bandwidth in bytes per second, each direction by itself."""

    read_Bps: float
    write_Bps: float
    direct: bool

    def __str__(self) -> str:
        how = "O_DIRECT" if self.direct else "through the page cache, O_DIRECT is refused"
        return (
            f"reads {self.read_Bps / 1e9:.2f} GB/s, writes {self.write_Bps / 1e9:.2f} GB/s ({how})"
        )


def check(directory: str | Path, wanted_nbytes: int, *, free: int | None = None) -> None:
    """Check that a directory can hold what all ranks of this host want to store below it.

    To be called before any rank reserves space, since reserved space is no longer free. ``free``: free
    bytes, if they are known already, perhaps from another host.

    Raises:
        DiskError: less is free than wanted.
    """
    free = free_below(directory) if free is None else free
    if wanted_nbytes > free:
        raise DiskError(
            f"{directory} has too little space for the training state: the ranks of this host "
            f"need {wanted_nbytes} bytes ({wanted_nbytes / 1e9:.2f} GB) and {free} "
            f"({free / 1e9:.2f} GB) are free, {wanted_nbytes - free} too few. Free space, name "
            "another nvme_path, store less on disk (max_in_cpu, or device 'cpu'), or use more "
            "hosts."
        )


def free_below(directory: str | Path) -> int:
    """Free bytes where ``directory`` is or will be made.

    Raises:
        DiskError: they cannot be read.
    """
    return free_nbytes(_existing(directory))


def measure(
    directory: str | Path, nbytes: int = 256 << 20, block_nbytes: int = BLOCK_NBYTES
) -> Speed:
    """Measure a disk by writing and reading up to ``nbytes``.

    Writes less on a slow disk, and never more than half of the free space. Takes about a second at most:
    rounds of doubling size, of which the last one counts. The page cache is not measured: data are
    written to the device and read from it.

    Raises:
        DiskError: the disk cannot be used.
    """
    file = SwapFile(directory, block_nbytes=block_nbytes)
    try:
        nbytes = min(nbytes, free_nbytes(directory) // 2)
        room = file.reserve(max(PAGE_NBYTES, nbytes // PAGE_NBYTES * PAGE_NBYTES))
        block = aligned_bytes(block_nbytes)
        block.random_()  # a file system cannot compress it
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
    """Seconds that the disk needs for one step of one rank while ``ranks_sharing`` ranks use it.

    Reads and writes share the device: together they take the sum of their times.
    """
    return ranks_sharing * (read_nbytes / speed.read_Bps + write_nbytes / speed.write_Bps)


def warning(directory: str | Path) -> str | None:
    """Why the directory is a poor choice although it works; None if it is not."""
    kind = filesystem_of(_existing(directory), Path("/proc/self/mounts").read_text())
    if medium_of(kind) == "memory":
        return (
            f"{directory} is a {kind}: its files are stored in this host's memory, so offloading "
            "to it saves no memory. Give as nvme_path a directory on a disk."
        )
    if medium_of(kind) == "network":
        return (
            f"{directory} is a network file system ({kind}): every step moves the whole optimizer "
            "state over the network, and other users share its speed. Give as nvme_path a "
            "directory on a local disk."
        )
    return None


def _existing(directory: str | Path) -> Path:
    """The directory, or its parent if it does not exist yet."""
    path = Path(os.path.expanduser(directory))
    return path if path.exists() else path.absolute().parent


def _split(extent: Extent, nbytes: int) -> list[Extent]:
    return [
        Extent(extent.offset + at, min(nbytes, extent.nbytes - at))
        for at in range(0, extent.nbytes, nbytes)
    ]


def _last_round(move: Callable[[Extent], None], room: Extent) -> tuple[float, int]:
    """Bytes per second of the last round, and the bytes moved in all rounds."""
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
