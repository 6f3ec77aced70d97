"""Holds the lock of the interpreter in C, as a library does that never lets it go."""

from __future__ import annotations

import ctypes
import time


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("ns", ctypes.c_long))


def hold(seconds: float) -> None:
    """Keep all other threads from running Python. Unlike a sleep, a signal does not end it."""
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    until = divmod(time.time_ns() + int(seconds * 1e9), 10**9)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(_Timespec(*until)))
