"""Chooses rows of a large table of parameters, so that each pair of values still occurs."""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Hashable, Sequence
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[Hashable, ...])


def covering(rows: Sequence[Row]) -> list[Row]:
    """Some of ``rows``, in their order, in which each pair of values of two columns of ``rows`` occurs.

    Each choice adds as many new pairs as possible, and of equal rows the first is taken, so that the
    choice is the same in every process. With ``ZEROSHARD_TEST_ALL=1`` it is all rows.
    """
    if os.environ.get("ZEROSHARD_TEST_ALL") == "1":
        return [*rows]
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    missing = set().union(*pairs)
    waiting = [(-len(found), at) for at, found in enumerate(pairs)]
    heapq.heapify(waiting)
    chosen = []
    while missing:
        gain, at = heapq.heappop(waiting)
        gain_now = -len(pairs[at] & missing)
        if gain_now > gain:  # other rows have added some of its pairs since
            heapq.heappush(waiting, (gain_now, at))
            continue
        missing -= pairs[at]
        chosen.append(at)
    return [rows[at] for at in sorted(chosen)]
