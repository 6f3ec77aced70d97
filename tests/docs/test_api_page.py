"""``docs/api.md`` has every public name, and each name on it exists and has a docstring."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
from pages import DOCS, blocks_of, split
from torch import nn

import zeroshard
from zeroshard.errors import ZeroShardError

PAGE = DOCS / "api.md"
ENTRY = re.compile(r"^\.\. (?:auto|py:)(\w+):: ([\w.]+)", re.MULTILINE)
ENTRIES = dict(reversed(found) for block in blocks_of(PAGE) for found in ENTRY.findall(block.text))
"""Name -> kind, such as "function"."""


def found(name: str, kind: str) -> Any:
    if kind == "module":
        return importlib.import_module(name)
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize(
    ("name", "kind"), [entry for entry in ENTRIES.items() if "integrations" not in entry[0]]
)  # those import packages that set environment variables; test_integrations_page.py uses them
def test_a_name_of_the_page_exists_and_is_described(name, kind):
    thing = found(name, kind)
    assert kind == "data" or thing.__doc__
    assert isinstance(thing, type) == (kind == "class")


@pytest.mark.parametrize(
    "module",
    [
        "zeroshard",
        *(f"zeroshard.{name}" for name in ("zero", "parallel", "planner")),
        "zeroshard_testing.streams",
    ],
)
def test_every_public_name_is_on_the_page(module):
    names = importlib.import_module(module).__all__
    others = {name for name in names if f"{module}.{name}" not in ENTRIES}
    packages = {name for name in others if f"## `{module}.{name}`" in PAGE.read_text()}
    assert others == packages


def test_every_exception_is_on_the_page():
    assert ENTRIES["zeroshard.errors"] == "module"
    errors = [v for v in vars(zeroshard.errors).values() if isinstance(v, type)]
    assert all(error.__doc__ for error in errors if issubclass(error, ZeroShardError))


def test_the_attributes_of_the_table_exist():
    rows = re.findall(r"^\| (`.+?) \|", split(PAGE.read_text())[0], re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(names) == 17
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    with zeroshard.Engine(nn.Linear(2, 2), config=config) as engine:
        assert [name for name in names if not hasattr(engine, name)] == []
