"""Gets and sets modules by dotted name."""

from __future__ import annotations

from functools import reduce
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted path below ``model``.

    >>> recursive_getattr([], "append.__name__")
    'append'
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set ``module`` at a dotted path below ``model``."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)
