"""Serves ``import deepspeed`` and its submodules from a table of names.

Every module below ``deepspeed`` is an object made from the table in :mod:`zeroshard.deepspeed.api_table`.
An attribute is looked up there and imported on first use, so importing the package costs little, and a
program may replace an attribute as in any other module. A finder at the end of ``sys.meta_path`` serves
``import deepspeed.x.y``; if there is no such module, its error gives the reason.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any

from zeroshard.deepspeed import api_table

PACKAGE = "deepspeed"


class NamesModule(ModuleType):
    """A module whose attributes are in the table. ``path``: its name without ``deepspeed.``."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{PACKAGE}.{path}", f"ZeroShard's answer to ``{PACKAGE}.{path}``.")
        self.__path__: list[str] = []  # _NamesFinder finds submodules, which are not files
        if (script := api_table.SCRIPTS.get(path)) and (spec := find_spec(script)) is not None:
            self.__file__ = spec.origin

    def __getattr__(self, name: str) -> Any:
        return attribute(self, self.__name__.partition(".")[2], name)

    def __dir__(self) -> list[str]:
        return known(self.__name__.partition(".")[2])


_made: dict[str, ModuleType] = {}


def module(path: str) -> ModuleType:
    """The module ``deepspeed.<path>``. All ways to reach it give the same object.

    >>> module("runtime.zero") is module("").zero
    True
    """
    if not path:
        return importlib.import_module(__package__ or "")
    path = api_table.SAME_MODULE.get(path, path)
    if path not in _made:
        _made[path] = NamesModule(path)
    return _made[path]


def attribute(owner: ModuleType, path: str, name: str) -> Any:
    """``deepspeed.<path>.<name>``, which is then stored in ``owner``, unless its value may change.

    Raises:
        AttributeError: there is no such name; with the reason, and the alternative if there is one.
    """
    if name.startswith("__") and name not in api_table.DUNDERS:
        raise AttributeError(f"module {owner.__name__!r} has no attribute {name!r}")
    full = f"{path}.{name}" if path else name
    row = api_table.find(full)
    if row is not None and row.home:
        home, _, inner = row.home.partition(":")
        value = getattr(importlib.import_module(home), inner) if inner else module(full)
    elif row is None and full in api_table.MODULES:
        value = module(full)
    else:
        # The table has no row, or its row says that the name does not exist.
        raise AttributeError(api_table.reason(full), name=name, obj=owner)
    if full not in api_table.LIVE:
        setattr(owner, name, value)
    return value


def known(path: str) -> list[str]:
    """What ``dir()`` shows for a module."""
    prefix = f"{path}." if path else ""
    found = {row.path[len(prefix) :] for row in api_table.NAMES if row.home}
    found |= {inner[len(prefix) :] for inner in api_table.MODULES if inner.startswith(prefix)}
    return sorted(name for name in found if name and "." not in name)


class _NamesLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return module(spec.name.partition(".")[2])

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: attributes are imported on first use."""


class _CommandLoader(Loader):
    """``python -m deepspeed.x`` where ``deepspeed.x`` has a ``main``."""

    def get_code(self, fullname: str) -> CodeType:
        """The code to run."""
        module = fullname.removesuffix(".__main__")
        return compile(f"import sys, {module} as own\nsys.exit(own.main())", fullname, "exec")


class _NamesFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, inner = fullname.partition(".")
        if package != PACKAGE or not inner or not is_ours(sys.modules.get(PACKAGE)):
            return None
        if inner in api_table.MODULES:
            return ModuleSpec(fullname, _NamesLoader(), is_package=True)
        parent, _, last = inner.rpartition(".")
        if last == "__main__" and api_table.find(f"{parent}.main") is not None:
            return ModuleSpec(fullname, _CommandLoader())
        # ``name`` is not passed, because "from deepspeed import x" would then hide the reason.
        raise ModuleNotFoundError(api_table.reason(inner))


def is_ours(found: ModuleType | None) -> bool:
    """Whether this module is the ``deepspeed`` package of the compatibility directory."""
    return getattr(found, "__zeroshard__", False) is True


_FINDER = _NamesFinder()


def serve() -> None:
    """Make submodules of ``deepspeed`` importable. Repeated calls have no effect."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
