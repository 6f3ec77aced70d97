"""The list of mistakes that `tools/mutations.py` puts into the package fits the code."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
from mutation_list import MUTATIONS, Mutation
from mutations import mutated

ROOT = Path(__file__).parents[2]


def test_each_mistake_is_put_in_one_place_and_is_no_error_of_syntax():
    for mutation in MUTATIONS:
        text = (ROOT / mutation.file).read_text()
        changed = mutated(text, mutation)
        assert changed != text, mutation.name
        if mutation.path.endswith(".py"):
            ast.parse(changed, mutation.name)


def is_there(word: str) -> bool:
    """Whether a test file, or a test in it, exists."""
    file, _, test = word.partition("::")
    found = (ROOT / file).is_file()
    pattern = rf"^def {re.escape(test)}\("
    return found and (not test or bool(re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)))


def test_the_witness_of_each_mistake_exists():
    for mutation in MUTATIONS:
        tests = [word for word in shlex.split(mutation.witness) if word.startswith("tests/")]
        assert tests and all(map(is_there, tests)), f"{mutation.name}: {mutation.witness}"


def test_names_are_unique_and_every_package_has_mistakes():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 64
    found = {mutation.path.partition("/")[0] for mutation in MUTATIONS}
    assert {path.parent.name for path in (ROOT / "src/zeroshard").glob("*/__init__.py")} <= found


@pytest.mark.parametrize("text", ["", "a = 1\nb = a\na = 1\n"])
def test_a_text_that_is_not_there_once_is_told(text):
    with pytest.raises(ValueError, match=r"name: its text occurs [02] times in file"):
        mutated(text, Mutation("name", "file", "a = 1", "a = 2", "tests"))
