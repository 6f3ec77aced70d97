"""Placeholders for names that can be imported but not used.

A placeholder is a class, so that ``isinstance`` works. Calling it, or a class method of it, raises
:class:`UnsupportedError` with the reason from the table.
"""

from __future__ import annotations

from typing import Any

from zeroshard.deepspeed import api_table
from zeroshard.errors import UnsupportedError


class _Stub(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(api_table.reason(cls.__qualname__))

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls  # stands for a class method: calling it raises


def __getattr__(name: str) -> Any:
    path = name.replace("/", ".")
    row = api_table.find(path)
    if row is None or row.verdict not in ("refused", "later"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = _Stub(path.rpartition(".")[2], (), {"__doc__": row.why, "__qualname__": path})
    globals()[name] = made
    return made
