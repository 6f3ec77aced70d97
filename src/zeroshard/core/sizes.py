"""Sizes in bytes as text."""

from __future__ import annotations

GIB, MIB = 2**30, 2**20


def decimal_text(nbytes: int) -> str:
    """Bytes in GB, as papers count them, or MB.

    >>> decimal_text(16_640_000_000), decimal_text(1_500_000)
    ('16.64 GB', '1.50 MB')
    """
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


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


def mib(nbytes: int) -> str:
    """A number of MiB, for tables.

    >>> mib(3 << 29)
    '1,536.0'
    """
    return f"{nbytes / MIB:,.1f}"
