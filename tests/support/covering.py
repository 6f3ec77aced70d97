"""Chooses rows of a large table of parameters, which stand for the whole table in ``make test``."""

from __future__ import annotations

import heapq
import itertools
import os
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row", bound=tuple[Hashable, ...])

FULL = os.environ.get("ZEROSHARD_TEST_ALL") == "1"
"""Whether all rows of all tables run, as in ``make test-full``."""


def covering(rows: Sequence[Row]) -> list[Row]:
    """Some of ``rows``, in their order, in which each pair of values of two columns occurs."""
    return _chosen(rows, together=2)


def each_value(rows: Sequence[Row]) -> list[Row]:
    """Some of ``rows``, in their order, in which each value of each column of ``rows`` occurs.

    For tables whose columns other tables combine, and whose rows are expensive.
    """
    return _chosen(rows, together=1)


def sampled(rows: Sequence[Any], every: int) -> list[Any]:
    """Parameters for ``parametrize``: ``make test`` runs one of ``every``, ``make test-full`` all."""
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=pytest.mark.full if at % every else (),
        )
        for at, row in enumerate(rows)
    ]


def _chosen(rows: Sequence[Row], *, together: int) -> list[Row]:
    """Rows in which all values of ``together`` columns occur that occur together in ``rows``.

    Each choice adds as many new combinations as possible, and of equal rows the first is taken, so that
    the choice is the same in every process. With ``ZEROSHARD_TEST_ALL=1`` it is all rows.
    """
    if os.environ.get("ZEROSHARD_TEST_ALL") == "1":
        return [*rows]
    found = [set(itertools.combinations(enumerate(row), together)) for row in rows]
    missing = set().union(*found)
    waiting = [(-len(new), at) for at, new in enumerate(found)]
    heapq.heapify(waiting)
    chosen = []
    while missing:
        gain, at = heapq.heappop(waiting)
        gain_now = -len(found[at] & missing)
        if gain_now > gain:  # other rows have added some of its combinations since
            heapq.heappush(waiting, (gain_now, at))
            continue
        missing -= found[at]
        chosen.append(at)
    return [rows[at] for at in sorted(chosen)]
