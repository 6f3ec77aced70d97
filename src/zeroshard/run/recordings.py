"""How a recording of a rank begins, and the one rule by which recordings are removed.

Any program may call a folder in ``/dev/shm`` ``zeroshard-...``, and containers that share it may number
their processes on their own. So a folder is removed only if all that is in it is known, and dead.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zeroshard.core.files import is_mine

MAGIC = int.from_bytes(b"ZSFLIGHT", "little")
VERSION = 2
HEADER = struct.Struct("<10Q")
"""Magic, version, process, rank, group size, ring, rows used, step, waiting, namespace of processes."""
STACKS = "process.stack"
"""The file beside recordings with the stacks of their process."""


class Writer(NamedTuple):
    """The process that writes or wrote a recording. ``space``: its :func:`pid_space`."""

    pid: int
    space: int


def read_writer(raw: bytes) -> Writer | None:
    """The writer of a recording; None if these bytes are no recording, or one of another version."""
    if len(raw) < HEADER.size:
        return None
    magic, version, pid, *_, space = HEADER.unpack_from(raw)
    return Writer(pid, space) if (magic, version) == (MAGIC, VERSION) else None


def pid_space() -> int:
    """The namespace of process numbers that this process is in; 0 where there is none.

    Containers that share ``/dev/shm`` may have namespaces of their own.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_if_ended(folder: Path, has_ended: Callable[[int], bool]) -> None:
    """Remove a folder of recordings whose writers have all ended, as ``has_ended(pid)`` says.

    It must be this user's and no link, and hold recordings of processes of this namespace and their
    stacks, and nothing else.

    Raises:
        OSError: it cannot be read, or another process has removed it.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not is_mine(about):
        return
    files = [*folder.iterdir()]
    if not all(map(_is_own_file, files)):
        return
    writers = [_writer(file) for file in files if file.name != STACKS]
    if writers and all(
        writer is not None and writer.space == pid_space() and has_ended(writer.pid)
        for writer in writers
    ):
        for file in files:
            file.unlink(missing_ok=True)
        folder.rmdir()


def _is_own_file(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISREG(about.st_mode) and is_mine(about)


def _writer(file: Path) -> Writer | None:
    with file.open("rb") as opened:
        return read_writer(opened.read(HEADER.size))
