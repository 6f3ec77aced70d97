"""How much memory did this process really need at most? (Linux)"""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def resident_nbytes(key: str = "VmRSS") -> int:
    """Resident bytes of this process: now, or at most (``VmHWM``)."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def give_back() -> None:
    """Freed memory goes back to the system, now and as soon as it is freed from now on."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 128 * 1024)  # otherwise it grows with the largest block freed
    libc.mallopt(_M_TRIM_THRESHOLD, 128 * 1024)
    gc.collect()
    libc.malloc_trim(0)


class Peak:
    """``nbytes``: what the block needed at most beyond what was there before."""

    def __enter__(self) -> Peak:
        give_back()
        _RESET.write_text("5")  # the high-water mark becomes what is resident now
        self._before = resident_nbytes()
        return self

    def __exit__(self, *_: object) -> None:
        self.nbytes = resident_nbytes("VmHWM") - self._before
