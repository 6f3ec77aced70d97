"""Sizes and numbers as text."""

from __future__ import annotations

import math

GIB, MIB = 2**30, 2**20


def size_text(nbytes: int) -> str:
    """Bytes with a unit in which they are not rounded to zero; negative ones too.

    >>> [size_text(n) for n in (3 * 2**30, 2**27, 2**26, 200_000, 2_000, -(2**31))]
    ['3.00 GiB', '0.12 GiB', '64.0 MiB', '0.2 MiB', '2,000 bytes', '-2.00 GiB']
    """
    size = abs(nbytes)
    if size >= GIB // 10:
        return f"{nbytes / GIB:,.2f} GiB"
    if size >= MIB // 10:
        return f"{nbytes / MIB:,.1f} MiB"
    return f"{nbytes:,} bytes"


def gib(nbytes: int) -> str:
    """A number of GiB with three digits or more, for tables and for texts with one unit.

    >>> [gib(n) for n in (0, 80 * 2**30, 3 * 2**29, 2**27, 200_000, -(2**20))]
    ['0', '80.00', '1.50', '0.125', '0.000186', '-0.000977']
    """
    size = abs(nbytes) / GIB
    digits = 2 if size >= 0.995 or not nbytes else 2 - math.floor(math.log10(size))
    return f"{nbytes / GIB:,.{digits}f}" if nbytes else "0"


def gib_text(nbytes: int) -> str:
    """Bytes in GiB, as everything of a plan.

    >>> gib_text(5 * 2**28)
    '1.25 GiB'
    """
    return f"{gib(nbytes)} GiB"


def mib(nbytes: int) -> str:
    """A number of MiB, for tables.

    >>> mib(3 << 29)
    '1,536.0'
    """
    return f"{nbytes / MIB:,.1f}"


def number_of(count: int, word: str) -> str:
    """How many there are of something.

    >>> number_of(1, "unit"), number_of(8030, "parameter")
    ('1 unit', '8,030 parameters')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"
