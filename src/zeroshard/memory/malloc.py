"""Does memory that was given back really go back to the system?

glibc keeps freed blocks up to 32 MB in its heap (its threshold grows with what is freed). Shards and
gradients of that size, freed between small activations, leave holes that nothing of their size fits into:
measured on 774 M parameters on disk, a heap of 2.4 GB where 0.3 GB were alive.
"""

from __future__ import annotations

import ctypes

LARGE_NBYTES = 4 << 20
"""Blocks from here on get pages of their own: large enough that page faults do not show."""

_M_MMAP_THRESHOLD = -3  # malloc.h; a threshold that was set stops growing


def return_large_blocks() -> bool:
    """From now on, large blocks of this process go back to the system when they are freed.

    For the process, and for good: the C library has one heap. Returns whether it listened (another
    allocator has no such call).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_M_MMAP_THRESHOLD, LARGE_NBYTES) == 1
