"""The rows that stand for a large table of test parameters."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from support import covering as choice
from support import kept_rows
from support.covering import covering, each_value, rows_for_full, some_stages

TESTS = Path(__file__).parents[1]
TABLES = {
    "four columns": [*itertools.product(range(4), "abc", (True, False), (1, 2, 3))],
    "rows that are not allowed": [
        row for row in itertools.product(range(4), range(3), "ab") if sum(row[:2]) < 5
    ],
    "two columns": [*itertools.product(range(3), "ab")],
}


def pairs(rows):
    return {pair for row in rows for pair in itertools.combinations(enumerate(row), 2)}


@pytest.fixture(autouse=True)
def _chosen(monkeypatch):
    monkeypatch.delenv("ZEROSHARD_TEST_ALL", raising=False)


@pytest.mark.parametrize("name", TABLES)
def test_each_pair_of_the_table_is_in_the_chosen_rows(name):
    chosen = covering(TABLES[name])
    assert pairs(chosen) == pairs(TABLES[name])
    assert chosen == [row for row in TABLES[name] if row in chosen]


@pytest.mark.parametrize("name", TABLES)
def test_each_value_of_the_table_is_in_the_rows_that_stand_for_it(name):
    chosen = each_value(TABLES[name])
    assert [set(column) for column in zip(*chosen)] == [
        set(column) for column in zip(*TABLES[name])
    ]
    assert chosen == [row for row in TABLES[name] if row in chosen]


def test_few_rows_are_chosen():
    assert len(TABLES["four columns"]) == 72
    assert 12 <= len(covering(TABLES["four columns"])) <= 16  # 4 x 3 pairs need twelve
    assert len(each_value(TABLES["four columns"])) == 4


def test_the_variable_runs_all_rows(monkeypatch):
    monkeypatch.setenv("ZEROSHARD_TEST_ALL", "1")
    assert covering(TABLES["four columns"]) == TABLES["four columns"]
    assert each_value(TABLES["four columns"]) == TABLES["four columns"]


class Row(NamedTuple):
    """What is read of a collected test."""

    nodeid: str
    callspec: SimpleNamespace
    marks: tuple[SimpleNamespace, ...]

    def iter_markers(self, name):
        return self.marks

    def __hash__(self):
        return hash(self.nodeid)


def kept(test: str, **parameters: list) -> list[tuple]:
    """The values with which ``make test`` runs a test that has one ``parametrize`` per parameter."""
    marks = tuple(SimpleNamespace(args=(name,)) for name in parameters)
    rows = {}
    for values in itertools.product(*parameters.values()):
        spec = SimpleNamespace(params=dict(zip(parameters, values, strict=True)))
        rows[Row(f"{test}[{values}]", spec, marks)] = values
    return [values for row, values in rows.items() if row not in rows_for_full([*rows])]


def test_each_value_at_one_stage_runs_of_a_test_with_engines():
    rows = kept("tests/ranks/test_a.py::test_it", stage=[0, 1, 2, 3], precision=["a", "b", "c"])
    assert len(rows) == 3
    assert {precision for _, precision in rows} == {"a", "b", "c"}
    assert len({stage for stage, _ in rows}) == 1


def test_all_stages_run_with_some_test_and_stage_3_with_every_other():
    tests = [f"tests/ranks/test_a.py::test_{number}" for number in range(40)]
    rows = Counter(row for test in tests for row in kept(test, stage=[0, 1, 2, 3]))
    assert rows.total() == 40
    assert {*rows} == {(0,), (1,), (2,), (3,)}
    assert 14 <= rows[3,] <= 26


def test_as_many_rows_run_as_a_table_says_and_they_differ(monkeypatch):
    limits = {"test_it": 3, "test_never": 0, "test_pairs": 4, "test_named": ("a-", "(1")}
    monkeypatch.setitem(kept_rows.ROWS, "ranks/test_a.py", limits)
    assert len(kept("tests/ranks/test_a.py::test_it", name=[*"abcdefghi"])) == 3
    assert len(kept("tests/ranks/test_a.py::TestAll::test_it", name=[*"ab"])) == 2
    assert kept("tests/ranks/test_a.py::test_never", name=[*"ab"]) == []
    pairs = kept(
        "tests/ranks/test_a.py::test_pairs", of=[*itertools.product("abcd", (1, 2), (3, 4))]
    )
    letters, first, second = (Counter(column) for column in zip(*(pair for (pair,) in pairs)))
    assert letters == Counter("abcd")
    assert first == {1: 2, 2: 2}
    assert second == {3: 2, 4: 2}
    assert kept("tests/ranks/test_a.py::test_named", stage=[0, 1, 3], at=[*"ab"]) == [
        (1, "a"),
        (1, "b"),
    ]
    assert len(kept("tests/ranks/test_a.py::test_other", name=[*"abcde"])) == 5


def test_every_limit_is_one_of_a_test():
    for file, limits in kept_rows.ROWS.items():
        text = (TESTS / file).read_text()
        missing = [name for name in limits if f"def {name}(" not in text]
        assert not missing, (file, missing)


def test_all_rows_of_a_cheap_test_run():
    rows = kept("tests/unit/test_a.py::test_it", stage=[0, 1, 2, 3], precision=["a", "b", "c"])
    assert len(rows) == 12


def test_numbers_that_are_no_zero_stages_all_run():
    assert len(kept("tests/ranks/test_a.py::test_it", stage=[0, 1, 2, 5])) == 4


def test_a_loop_inside_a_test_goes_through_stage_3_and_one_more(monkeypatch):
    monkeypatch.setattr(choice, "FULL", False)
    other, last = some_stages((0, 1, 2, 3))
    assert last == 3 and other in (0, 1, 2)
    assert len(some_stages((0, 1, 2))) == 2
    assert some_stages((1, 3)) == [1, 3]
    monkeypatch.setattr(choice, "FULL", True)
    assert some_stages((0, 1, 2, 3)) == [0, 1, 2, 3]


def test_what_was_imported_stays_out_of_collections_after_a_search():
    """A search of the planner ends so; ``tests/conftest.py`` keeps what it froze."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert gc.get_freeze_count() >= frozen > 1000
