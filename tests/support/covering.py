"""Chooses rows of a large table of parameters, which stand for the whole table in ``make test``."""

from __future__ import annotations

import heapq
import itertools
import os
import sys
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import pytest

from support.kept_rows import ROWS

Row = TypeVar("Row", bound=tuple[Hashable, ...])

FULL = os.environ.get("ZEROSHARD_TEST_ALL") == "1"
"""Whether all rows of all tables run, as in ``make test-full``."""

EXPENSIVE = frozenset({"accounting", "compat", "faults", "parity", "ranks", "streams"})
"""Folders whose tests build engines or start processes."""


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


def some_stages(stages: Sequence[int]) -> list[int]:
    """Of the ZeRO ``stages`` that the body of a test goes through, those that ``make test`` runs.

    Stage 3 and one more, or two without stage 3; the name of the calling function chooses.
    """
    others = [stage for stage in stages if stage != 3]
    if FULL or len(stages) < 3:
        return [*stages]
    at = zlib.crc32(sys._getframe(1).f_code.co_name.encode()) % len(others)
    if 3 in stages:
        return [others[at], 3]
    return sorted({others[at], others[at - 1]})


def rows_for_full(items: Sequence[Any]) -> set[Any]:
    """Of collected ``items``, the rows that only ``make test-full`` runs.

    Of a test in one of the folders :data:`EXPENSIVE`, so many rows stay that each value of each parameter
    occurs, at one ZeRO stage, chosen by the name of the test: stage 3 of every other test, since it does
    most of what the others do. The tuples of one ``parametrize`` are values themselves: all of them stay.
    Of a test in :data:`kept_rows.ROWS` as many stay as are named there, and differ most.
    """
    by_test: dict[str, list[Any]] = {}
    for item in items:
        by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[Any] = set()
    for name, rows in by_test.items():
        left_out.update({*rows}.difference(_kept(name, rows)))
    return left_out


def _kept(name: str, rows: Sequence[Any]) -> list[Any]:
    """The ``rows`` of one test that ``make test`` runs."""
    file, _, test = name.removeprefix("tests/").partition("::")
    wanted = ROWS.get(file, {}).get(test.rpartition("::")[2], len(rows))
    if not isinstance(wanted, int):
        return [row for row in rows if row.nodeid.partition("[")[2].startswith(wanted)]
    found = [rows[at] for at in sorted(_representatives(name, rows))]
    return found if wanted >= len(found) else _most_different(found, wanted)


def _most_different(rows: Sequence[Any], count: int) -> list[Any]:
    """``count`` of ``rows``: each has the values that those before it have least often."""
    waiting = [*rows]
    had: Counter[Hashable] = Counter()
    for _ in range(count):
        row = min(
            waiting, key=lambda row: sorted((had[each] for each in _parts(row)), reverse=True)
        )
        waiting.remove(row)
        had.update(_parts(row))
    return [row for row in rows if row not in waiting]


def _parts(row: Any) -> list[Hashable]:
    """The values of a row's parameters, with their names; those of a tuple one by one."""
    found: list[Hashable] = []
    for name, value in row.callspec.params.items() if hasattr(row, "callspec") else ():
        parts = value if isinstance(value, tuple) else (value,)
        found += [(name, at, repr(part)) for at, part in enumerate(parts)]
    return found


def _representatives(name: str, rows: Sequence[Any]) -> set[int]:
    """Positions of rows in which each value of each parameter occurs, but for ZeRO stages."""
    if not EXPENSIVE.intersection(name.split("/")) or not hasattr(rows[0], "callspec"):
        return {*range(len(rows))}
    stages = _stages({_stage(row) for row in rows}, name)
    order = sorted(range(len(rows)), key=lambda at: _stage(rows[at]) not in stages)
    chosen = _cover([_values(rows[at], stages) for at in order])
    return {order[at] for at in chosen}


def _stage(row: Any) -> Any:
    return row.callspec.params.get("stage")


def _values(row: Any, stages: set[Any]) -> set[Hashable]:
    """What a row has of each ``parametrize``, without other ZeRO stages than ``stages``."""
    found: set[Hashable] = set()
    for mark in row.iter_markers("parametrize"):
        names = mark.args[0]
        names = names.replace(",", " ").split() if isinstance(names, str) else names
        values = tuple(row.callspec.params[name] for name in names)
        if names != ["stage"] or values[0] in stages:
            found.add((*names, *(v if isinstance(v, Hashable) else id(v) for v in values)))
    return found


def _stages(found: set[Any], name: str) -> set[Any]:
    """Of the ZeRO stages ``found``, those that ``make test`` runs. Everything else is no stage."""
    if not found <= {0, 1, 2, 3} or len(found) < 2:
        return found
    turn = zlib.crc32(name.encode())
    others = sorted(found - {3})
    return {3} if 3 in found and turn % 2 else {others[turn // 2 % len(others)]}


def _chosen(rows: Sequence[Row], *, together: int) -> list[Row]:
    """Rows in which all values of ``together`` columns occur that occur together in ``rows``.

    Each choice adds as many new combinations as possible, and of equal rows the first is taken, so that
    the choice is the same in every process. With ``ZEROSHARD_TEST_ALL=1`` it is all rows.
    """
    if os.environ.get("ZEROSHARD_TEST_ALL") == "1":
        return [*rows]
    chosen = _cover([set(itertools.combinations(enumerate(row), together)) for row in rows])
    return [rows[at] for at in sorted(chosen)]


def _cover(found: Sequence[set[Hashable]]) -> set[int]:
    """Positions of sets whose union is that of all. Each adds as many new elements as possible."""
    missing = set().union(*found)
    waiting = [(-len(new), at) for at, new in enumerate(found)]
    heapq.heapify(waiting)
    chosen = set()
    while missing:
        gain, at = heapq.heappop(waiting)
        gain_now = -len(found[at] & missing)
        if gain_now > gain:  # other sets have added some of its elements since
            heapq.heappush(waiting, (gain_now, at))
            continue
        missing -= found[at]
        chosen.add(at)
    return chosen
