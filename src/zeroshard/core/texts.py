"""Sizes, numbers and ranks as text, and values without their secrets."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

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


HIDDEN = "***"
"""What is shown in place of a secret."""

_SECRET = re.compile(r"api_?key|secret|passw(or)?d|credential|(^|_)token$", re.IGNORECASE)
_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s\"]*@")


def without_secrets(value: Any, name: str = "") -> Any:
    """``value`` of the key ``name`` with :data:`HIDDEN` for secrets, in containers of our own.

    Secrets are values of keys such as ``api_key`` and ``token``, and the user in an address.

    >>> without_secrets({"comet": {"api_key": "k"}, "uris": ["http://me:pw@host/a"], "token": None})
    {'comet': {'api_key': '***'}, 'uris': ['http://***@host/a'], 'token': None}
    """
    if _SECRET.search(name) and value is not None and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: without_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_secrets(inner) for inner in value]
    return _OF_ADDRESS.sub(f"{HIDDEN}@", value) if isinstance(value, str) else value


def rank_ranges(ranks: Iterable[int], limit: int = 64) -> str:
    """Ranks in short form, in about ``limit`` characters.

    >>> rank_ranges([0, 1, 2, 4]), rank_ranges([3]), rank_ranges([6, 7])
    ('ranks 0-2,4', 'rank 3', 'ranks 6,7')
    >>> rank_ranges(range(0, 200, 2), limit=12)
    'ranks 0,2,4,6,8,10,... (100 in all)'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ""
    for run in runs:
        part = f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        if len(text) + len(part) > limit:
            return f"ranks {text}... ({len(ordered)} in all)"
        text += part + ","
    return ("rank " if len(ordered) == 1 else "ranks ") + text.rstrip(",")
