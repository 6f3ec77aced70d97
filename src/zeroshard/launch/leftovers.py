"""Removes from ``/dev/shm`` what ranks that were killed have left there.

Each rank writes a recording of its last collectives, which a survivor or the watchdog reads when the rank
is dead. If all ranks of a host were killed, no rank is left to remove them, and a run that restarts often
would leave more and more. The launcher removes those that its own ranks wrote, after all have ended.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection
from pathlib import Path

from zeroshard.run.recordings import remove_if_ended


def remove_recordings(run_id: str, pids: Collection[int], root: Path | None = None) -> None:
    """Remove the recordings of a run whose writers are all among ``pids``, which have ended."""
    shared = Path("/dev/shm")
    place = root or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
    for folder in place.glob(f"zeroshard-{run_id}-" + "[0-9a-f]" * 8):
        with contextlib.suppress(OSError):  # a rank has removed it
            remove_if_ended(folder, pids.__contains__)
