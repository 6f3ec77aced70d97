"""Removes from ``/dev/shm`` what ranks that were killed have left there.

Each rank writes a recording of its last collectives, which a survivor or the watchdog reads when the rank
is dead. If all ranks of a host were killed, no rank is left to remove them, and a run that restarts often
would leave more and more. The launcher removes those that its own ranks wrote, after all have ended.
"""

from __future__ import annotations

import contextlib
import struct
import tempfile
from collections.abc import Collection
from pathlib import Path

_HEADER = struct.Struct("<8s2Q")  # magic, version, process id: the start of a recording
_MAGIC = b"ZSFLIGHT"


def remove_recordings(run_id: str, pids: Collection[int], root: Path | None = None) -> None:
    """Remove the recordings of a run whose writers are all among ``pids``, which have ended."""
    shared = Path("/dev/shm")
    place = root or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
    for folder in place.glob(f"zeroshard-{run_id}-" + "[0-9a-f]" * 8):
        with contextlib.suppress(OSError):  # a rank has removed it
            files = list(folder.iterdir())
            writers = {_writer(file) for file in files if file.suffix != ".stack"}
            if writers and writers <= set(pids):  # nothing else is in the folder
                for file in files:
                    file.unlink(missing_ok=True)
                folder.rmdir()


def _writer(file: Path) -> int | None:
    """The process id in a recording; None if the file is something else."""
    with file.open("rb") as opened:
        start = opened.read(_HEADER.size)
    if len(start) < _HEADER.size:
        return None
    magic, _, pid = _HEADER.unpack(start)
    return int(pid) if magic == _MAGIC else None
