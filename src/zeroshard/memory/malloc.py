"""Makes the C library return large freed blocks to the system.

By default glibc keeps freed blocks of up to 32 MB in its heap (the threshold grows with the size of freed
blocks). Shards, full units, gradients and logits of that size, freed between small activations, leave
holes in which nothing of their size fits, and the heap grows from step to step (ADR 0008).

If the user chose one of both limits in the environment (``MALLOC_MMAP_THRESHOLD_``,
``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES``), both stay as they are.
"""

from __future__ import annotations

import ctypes
import os

LARGE_NBYTES = 16 << 20
"""Blocks from this size on get pages of their own, on CPU ranks."""

LARGE_OFFLOADED_NBYTES = 4 << 20
"""The same where state is offloaded on CPU ranks, to save as much as possible."""

KEPT_NBYTES = 64 << 20
"""Free memory at the end of the heap that stays, so that small activations cost no page faults."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h; setting one stops both from growing

_set_nbytes: set[int] = set()
"""Thresholds that engines of this process have set. The smallest one holds."""


def return_large_blocks(*, offloaded: bool) -> bool:
    """Return large blocks of this process to the system when they are freed, from now on.

    This holds for the whole process, since the C library has one heap. ``offloaded``: state is offloaded
    on CPU ranks. Returns whether it worked (another allocator has no such call).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or _user_chose():
        return False
    _set_nbytes.add(LARGE_OFFLOADED_NBYTES if offloaded else LARGE_NBYTES)
    worked = mallopt(_M_MMAP_THRESHOLD, min(_set_nbytes)) == 1
    if LARGE_OFFLOADED_NBYTES not in _set_nbytes:
        worked &= mallopt(_M_TRIM_THRESHOLD, KEPT_NBYTES) == 1
    return bool(worked)


def _user_chose() -> bool:
    tuned = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{limit}_THRESHOLD_" in os.environ
        or f"glibc.malloc.{limit.lower()}_threshold" in tuned
        for limit in ("MMAP", "TRIM")
    )
