"""The limits of complexity, length and parameters: each is found above it, and not at it."""

from __future__ import annotations

import limits
import pytest


def body_of(lines: int) -> str:
    """A function of so many lines."""
    return "def f():\n" + "    x = 1\n" * (lines - 1)


def decisions(count: int) -> str:
    """A function with a boolean operator for each decision after the first, and one condition."""
    return f"def f(a):\n    if {' and '.join(['a'] * count)}:\n        return 1\n    return 0\n"


def test_boolean_operators_count_as_decisions():
    assert list(limits.too_complex(decisions(14))) == []
    (found,) = limits.too_complex(decisions(15))
    assert found.startswith("1: f has the complexity 16, more than 15.")


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n{}",
        "class A:\n    class B:\n{}",
        "def outer(a):\n    def inner(a):\n        return a\n{}",
    ],
)
def test_complexity_is_found_in_methods_and_closures(source):
    indent = " " * (8 if "class B" in source else 4)
    inner = "".join(f"{indent}{line}\n" for line in decisions(15).splitlines())
    assert list(limits.too_complex(source.format(inner)))


def test_a_function_of_61_lines_is_too_long():
    assert list(limits.too_long(body_of(60))) == []
    assert list(limits.too_long(body_of(61))) == ["1: f has 61 lines, more than 60."]


def test_the_docstring_and_the_signature_count_as_lines():
    source = (
        'class A:\n    def f(\n        self,\n    ):\n        """\n' + "\n" * 56 + '        """\n'
    )
    assert list(limits.too_long(source)) == ["2: A.f has 61 lines, more than 60."]


def test_a_file_of_501_lines_is_too_long():
    assert list(limits.too_many_lines("x = 1\n" * 500, "a.py")) == []
    (found,) = limits.too_many_lines("x = 1\n" * 501, "a.py")
    assert found.startswith("1: the file has 501 lines, more than 500.")


NAMES = ", ".join("abcdefghij")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def f({NAMES}): ...", []),
        (f"def f({NAMES}, k): ...", ["1: f has 11 parameters, more than 10."]),
        (f"def f({NAMES}, *k): ...", ["1: f has 11 parameters, more than 10."]),
        (f"async def f(*, {NAMES}, **k): ...", ["1: f has 11 parameters, more than 10."]),
        (f"class A:\n def f(self, {NAMES}): ...", []),
        (f"class A:\n def f(self, {NAMES}, k): ...", ["2: A.f has 11 parameters, more than 10."]),
        (f"def public({NAMES}, k): ...", []),
        (f"class Public:\n def __init__(self, {NAMES}, k): ...", []),
    ],
)
def test_11_parameters_are_too_many_unless_the_name_is_public(source, found):
    assert list(limits.too_wide(source, "core/a.py", {"public", "Public"})) == found


def test_options_of_commands_are_not_counted():
    assert list(limits.too_wide(f"def command({NAMES}, k): ...", "cli/a.py", set())) == []


def test_public_names_are_those_that_pages_list():
    page = "Run `initialize`, not x.\n.. autoclass:: zeroshard.zero.Init\n   :members:\n"
    assert limits.public_names([page]) == {"initialize", "Init"}


def test_a_report_names_the_file():
    (line,) = limits.findings("core/a.py", body_of(61), set())
    assert line.startswith("core/a.py:1: f has 61 lines")


@pytest.mark.parametrize("name", [*limits.WIDER, *limits.LONGER_FILES])
def test_an_exception_is_of_something_that_exists(name):
    path, _, function = name.partition(":")
    source = (limits.SOURCE / path).read_text()
    if function:
        assert any(limits.too_wide(source, f"{path}?", set())), f"{name} needs no exception"
    else:
        assert any(limits.too_many_lines(source, f"{path}?")), f"{name} needs no exception"
