"""The rows that stand for a large table of test parameters."""

from __future__ import annotations

import itertools

import pytest
from support.covering import covering, each_value

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
