"""Packs flags (did a parameter get a gradient?) into numbers that a small all-gather exchanges."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

BITS = 48
"""Flags per number. An fp64 represents integers below 2**53 exactly."""


def pack_flags(flags: Sequence[bool]) -> list[float]:
    """Flags as whole numbers, first flag in the lowest bit.

    >>> pack_flags([True, False, True])
    [5.0]
    """
    return [
        float(sum(1 << i for i, flag in enumerate(flags[at : at + BITS]) if flag))
        for at in range(0, len(flags), BITS)
    ]


def unpack_any(words_WK: Tensor, count: int) -> list[bool]:
    """The flags that are set on any of W ranks. Waits for the device."""
    united = []
    for column in words_WK.t().tolist():
        word = 0
        for value in column:
            word |= int(value)
        united.append(word)
    return [bool(united[i // BITS] >> (i % BITS) & 1) for i in range(count)]
