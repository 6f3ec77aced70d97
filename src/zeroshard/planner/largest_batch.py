"""Finds the largest micro-batch whose plan fits, with few simulations."""

from __future__ import annotations

import math
from collections.abc import Callable

from zeroshard.core.sizes import gib_text
from zeroshard.errors import UsageError

MOST = 2**20
"""Samples of a micro-batch that are tried at most."""

_BY_LINE = 6
"""Tries along a line, after which the interval is halved: peaks are nearly linear in the batch."""


def largest_batch(peak_nbytes: Callable[[int], int], limit_nbytes: int) -> tuple[int, int]:
    """The largest number of samples whose peak is within the limit, and the peak of one more.

    ``peak_nbytes(samples)`` simulates a run; it must not fall with more samples. Both numbers of samples
    were simulated. Costs about five simulations.

    >>> largest_batch(lambda samples: 100 + 30 * samples, 1000)
    (30, 1030)

    Raises:
        UsageError: one sample does not fit, or ``MOST`` do.
    """
    fits, fits_nbytes = 1, peak_nbytes(1)
    if fits_nbytes > limit_nbytes:
        raise UsageError(
            f"no micro-batch fits {gib_text(limit_nbytes)}: one sample needs "
            f"{gib_text(fits_nbytes)}, {gib_text(fits_nbytes - limit_nbytes)} too much. Use shorter "
            "samples, activation checkpointing, a higher stage, offload or more ranks."
        )
    known = [(fits, fits_nbytes)]
    over: int | None = None
    while over is None or over - fits > 1:
        guess = _guess(known, fits, over, limit_nbytes)
        nbytes = peak_nbytes(guess)
        known.append((guess, nbytes))
        if nbytes > limit_nbytes:
            over = guess
        elif guess >= MOST:
            raise UsageError(
                f"a micro-batch of {MOST:,} samples fits {gib_text(limit_nbytes)}, and more are not "
                "tried: memory does not limit the batch. Give --batch a number."
            )
        else:
            fits = guess
    return fits, dict(known)[over]


def _guess(known: list[tuple[int, int]], fits: int, over: int | None, limit_nbytes: int) -> int:
    """The next number of samples to try, between ``fits`` and ``over``, without them."""
    if len(known) == 1:
        return 2
    (one, one_nbytes), (two, two_nbytes) = sorted(known, key=lambda at: abs(limit_nbytes - at[1]))[
        :2
    ]
    slope = (two_nbytes - one_nbytes) / (two - one)
    if over is not None and (len(known) > _BY_LINE or slope <= 0):
        return (fits + over) // 2
    line = one + int((limit_nbytes - one_nbytes) / slope) if slope > 0 else 2 * fits
    return max(fits + 1, min(line, MOST if over is None else over - 1))


def limit_of(memory_gib: float) -> int:
    """Bytes of device memory.

    Raises:
        UsageError: it is no size of memory.
    """
    if not 0 < memory_gib < math.inf:  # also NaN
        raise UsageError(
            f"--memory is {memory_gib:g} GiB, which is not a size of memory. Give the GiB of one device."
        )
    return int(memory_gib * 2**30)
