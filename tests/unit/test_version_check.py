"""Which libraries are checked, and the messages for old and new releases of them."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest

from zeroshard.deepspeed import distributed
from zeroshard.deepspeed.distributed import CONSUMERS, Consumer

LIBRARY = Consumer(
    "shardlib", "shardlib.trainer", oldest="1.8.0", tested="1.15.2", why="it sings in the rain"
)


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(distributed, "CONSUMERS", (LIBRARY,))


def in_use(monkeypatch, version: str | None) -> None:
    package = ModuleType("shardlib")
    if version is not None:
        package.__version__ = version
    monkeypatch.setitem(sys.modules, "shardlib", package)
    monkeypatch.setitem(sys.modules, "shardlib.trainer", ModuleType("shardlib.trainer"))


@pytest.mark.parametrize("version", ["0.34.2", "1.7.99", "1.8", "1.8.0", "1.15.2", "1.15.9", "1.9"])
def test_only_what_is_below_the_oldest_is_too_old(table, version):
    is_old = version in ("0.34.2", "1.7.99")
    assert bool(distributed.too_old({"shardlib": version})) is is_old


def test_the_text_for_a_release_that_is_too_old(table):
    assert distributed.too_old({"shardlib": "1.7.1"}) == [
        "shardlib 1.7.1 is too old for ZeroShard, which needs 1.8.0 or newer: it sings in the rain. "
        "Run: pip install --upgrade 'shardlib>=1.8.0'"
    ]


@pytest.mark.parametrize(
    ("version", "is_new"),
    [("1.15.2", False), ("1.15.90", False), ("1.16.0.dev0", True), ("2.0.0rc1", True)],
)
def test_a_newer_minor_release_is_worth_a_line(table, version, is_new):
    line = (
        f"shardlib {version} is newer than 1.15.2, the newest version that ZeroShard was tested "
        "with"
    )
    assert distributed.newer({"shardlib": version}) == ([line] if is_new else [])


def test_a_library_that_is_not_in_use_is_not_judged(table, monkeypatch):
    in_use(monkeypatch, "0.1")
    monkeypatch.delitem(sys.modules, "shardlib.trainer")
    assert distributed.versions([LIBRARY]) == {}


def test_a_mark_may_be_an_attribute_that_has_to_hold_something(monkeypatch):
    in_use(monkeypatch, "0.1")
    state = SimpleNamespace(shared={})
    monkeypatch.setattr(sys.modules["shardlib.trainer"], "State", state, raising=False)
    marked = LIBRARY._replace(mark="shardlib.trainer:State.shared")
    assert distributed.versions([marked]) == {}
    state.shared["rank"] = 0
    assert distributed.versions([marked]) == {"shardlib": "0.1"}


def test_a_library_without_any_version_is_not_judged(table, monkeypatch):
    in_use(monkeypatch, None)
    assert distributed.versions([LIBRARY]) == {}
    distributed.check_consumers()


def test_the_version_may_be_that_of_the_distribution(monkeypatch):
    in_use(monkeypatch, None)
    monkeypatch.setattr(metadata, "version", {"shardlib": "1.9.0"}.__getitem__)
    assert distributed.versions([LIBRARY]) == {"shardlib": "1.9.0"}


@pytest.mark.parametrize("row", CONSUMERS, ids=lambda row: row.name)
def test_the_table_knows_what_is_installed_here(row):
    """If it fails, a newer minor release is installed than the table names: update the table."""
    try:
        version = metadata.version(row.name)
    except metadata.PackageNotFoundError:
        pytest.skip("not installed")
    assert distributed.numbers(row.oldest) <= distributed.numbers(version)
    assert distributed.numbers(version)[:2] == distributed.numbers(row.tested)[:2]


@pytest.mark.parametrize("row", CONSUMERS, ids=lambda row: row.name)
def test_every_row_is_complete(row):
    assert re.fullmatch(r"\d+\.\d+\.\d+", row.oldest)
    assert row.why and not row.why.endswith(".")
