"""Finds the statements of the source that order streams and host threads, and removes one at a time."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import zeroshard

SRC = Path(zeroshard.__file__).parent

CALLS = {
    "wait_stream", "wait_event", "record_stream", "record_use", "synchronize", "_before",

}  # fmt: skip
"""Methods that order streams or threads, by name."""
WAITS = {"wait"}
"""Methods that do so in the modules below; elsewhere they wait for processes or threads."""
WAITING = (
    "zero", "comm/collectives.py", "comm/process_group.py", "comm/hops.py", "offload",
    "engine/optimizer_step.py", "engine/build.py", "engine/build_runtime.py",
)  # fmt: skip
OUTSIDE = ("launch", "watchdog", "deepspeed", "cli", "integrations")
"""Packages without work for a device, or for programs that bring their own streams."""


class Statement(NamedTuple):
    """One call. ``function``: its qualified name. ``at``: which of several equal calls in it."""

    file: str
    function: str
    call: str
    at: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.function}: {self.call}" + (f" #{self.at}" if self.at else "")


def _is_ordering(call: ast.Call, file: str) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name = call.func.attr
    return name in CALLS or (name in WAITS and file.startswith(WAITING))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if isinstance(node, ast.FunctionDef):
                yield prefix + node.name, node
            inner = f"{prefix}{node.name}." + (
                "<locals>." if isinstance(node, ast.FunctionDef) else ""
            )
            yield from _functions(node, inner)
        else:
            yield from _functions(node, prefix)


def _own_calls(function: ast.AST) -> Iterator[ast.Call]:
    """The calls of a function, without those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        if isinstance(node, ast.Call):
            yield node
        yield from _own_calls(node)


@cache
def tree_of(file: str) -> ast.Module:
    """The syntax tree of a file of the source."""
    return ast.parse((SRC / file).read_text())


def _located(file: str) -> Iterator[tuple[Statement, ast.Call]]:
    for name, function in _functions(tree_of(file)):
        seen: dict[str, int] = {}
        for call in _own_calls(function):
            if _is_ordering(call, file):
                text = ast.unparse(call)
                at = seen[text] = seen.get(text, -1) + 1
                yield Statement(file, name, text, at), call


@cache
def statements() -> list[Statement]:
    """Every ordering statement of the source."""
    files = sorted(path.relative_to(SRC).as_posix() for path in SRC.rglob("*.py"))
    return [
        statement
        for file in files
        if file.split("/")[0] not in OUTSIDE
        for statement, _ in _located(file)
    ]


class _Remove(ast.NodeTransformer):
    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> Any:
        if node is self._call:
            assert isinstance(node.func, ast.Attribute)
            return node.func.value  # ``start(...).wait()`` still starts
        return self.generic_visit(node)


def _code_of(code: CodeType, qualname: str) -> CodeType:
    """The code object of a function in the code of its module."""
    for part in qualname.replace(".<locals>", "").split("."):
        code = next(c for c in code.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return code


def _function(statement: Statement) -> tuple[FunctionType, str]:
    """The outermost function around the statement, and the rest of the qualified name."""
    module = importlib.import_module(
        "zeroshard." + statement.file.removesuffix(".py").replace("/", ".")
    )
    outer = statement.function.split(".<locals>")[0]
    *classes, name = outer.split(".")
    owner: Any = module
    for part in classes:
        owner = getattr(owner, part)
    found = inspect.getattr_static(owner, name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    return inspect.unwrap(found), outer


@contextmanager
def removed(statement: Statement) -> Iterator[None]:
    """A context in which the statement does nothing."""
    tree = ast.parse((SRC / statement.file).read_text())
    for name, function in _functions(tree):
        if name != statement.function:
            continue
        calls = [c for c in _own_calls(function) if ast.unparse(c) == statement.call]
        _Remove(calls[statement.at]).visit(tree)
    ast.fix_missing_locations(tree)
    module = compile(tree, str(SRC / statement.file), "exec", dont_inherit=True)
    function, outer = _function(statement)
    before = function.__code__
    function.__code__ = _code_of(module, outer)
    try:
        yield
    finally:
        function.__code__ = before
