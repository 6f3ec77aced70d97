"""Optimizer state inside containers, as a flat table: one name for each tensor and number.

Most optimizers keep ``state[p]["exp_avg"]``. Some keep a dict, list, tuple or deque of tensors there.
What cuts, stores, saves or counts state works on :func:`flat`, where such a tensor has the name
``momentum_buffer@({0.9},)``: after ``@`` stands its path as a Python literal, with one element for each
container: ``{key}`` of a dict, ``[index]`` of a list, ``[index, maxlen]`` of a deque, ``(index,)`` of a
tuple. So the containers can be made again from the names alone (:func:`nested`).
"""

from __future__ import annotations

import ast
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from zeroshard.errors import CheckpointError

_MARK = "@("
_KINDS = (dict, OrderedDict, list, tuple, deque)
_KEYS = (str, int, float, bool, type(None))

Path = tuple[Any, ...]

_NO_NAMES = (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError)
"""What reading and building from any text may raise."""


def flat(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """``state`` with a name for each value inside containers; the same object if it has none.

    An empty container is a value too.
    """
    for value in state.values():
        if type(value) in _KINDS:
            return {_name(base, path): value for base, path, value in _values(state)}
    return state


def unkeyed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """What an optimizer keeps in its state for itself (``state["k"]``), and not for a parameter."""
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def is_nested(name: str) -> bool:
    """Whether a name of :func:`flat` is of a value inside a container."""
    return _MARK in name


def is_keepable(name: str, value: object) -> bool:
    """Whether a value that is no tensor can be saved and made again: a number, or nothing."""
    return isinstance(value, (int, float, bool)) or (value is None and not is_nested(name))


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The containers again: ``nested(flat(state)) == state``.

    Raises:
        CheckpointError: names, which may come from a damaged checkpoint, are none of :func:`flat`.
    """
    found: dict[str, list[tuple[Path, Any]]] = {}
    try:
        for name, value in values.items():
            base, path = _parsed(name)
            found.setdefault(base, []).append((path, value))
        state = {base: _built(items) for base, items in found.items()}
        if flat(state).keys() != values.keys():
            raise ValueError("other names")
        return state
    except _NO_NAMES as error:
        raise CheckpointError(
            f"optimizer state with the names {', '.join(map(repr, values))[:200]} cannot be loaded: they "
            "describe no dict, list, tuple or deque. The checkpoint was damaged, or written by another "
            "program: load another one, or load it with load_optimizer_states=False."
        ) from error


def replace(state: dict[str, Any], change: Callable[[str, Any], Any]) -> None:
    """Put ``change(name, value)`` in the place of each value of :func:`flat`."""
    for base, value in state.items():
        new = _replaced(value, base, (), change)
        if new is not value:
            state[base] = new


def grown(names: Iterable[str]) -> list[str]:
    """``names``, and those that a deque of limited length will still get."""
    found: dict[str, None] = {}
    for name in names:
        base, path = _parsed(name)
        levels = [range(e[1]) if _is_limited(e) else () for e in path]
        for at, indices in enumerate(levels):
            for index in indices:
                changed = (*path[:at], [index, path[at][1]], *path[at + 1 :])
                found[_name(base, changed)] = None
        found[name] = None
    return list(found)


def _is_limited(element: Any) -> bool:
    return isinstance(element, list) and len(element) == 2 and element[1] is not None


def _steps(value: Any) -> Iterator[tuple[Any, Any]]:
    """The elements of a container, each with its step of the path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield {key}, item
    elif isinstance(value, tuple):
        for at, item in enumerate(value):
            yield (at,), item
    else:
        more = [value.maxlen] if isinstance(value, deque) else []
        for at, item in enumerate(value):
            yield [at, *more], item


def _is_open(value: Any) -> bool:
    """Whether names go into a container."""
    if type(value) not in _KINDS or not value:
        return False
    return not isinstance(value, Mapping) or all(type(key) in _KEYS for key in value)


def _values(state: Mapping[str, Any]) -> Iterator[tuple[str, Path, Any]]:
    def walk(base: str, path: Path, value: Any) -> Iterator[tuple[str, Path, Any]]:
        if not _is_open(value):
            yield base, path, value
            return
        for step, item in _steps(value):
            yield from walk(base, (*path, step), item)

    for base, value in state.items():
        yield from walk(base, (), value)


def _replaced(value: Any, base: str, path: Path, change: Callable[[str, Any], Any]) -> Any:
    if not _is_open(value):
        return change(_name(base, path), value)
    items = [
        (step, item, _replaced(item, base, (*path, step), change)) for step, item in _steps(value)
    ]
    if isinstance(value, tuple):
        same = all(new is item for _, item, new in items)
        return value if same else tuple(new for _, _, new in items)
    for step, item, new in items:
        if new is not item:
            key = next(iter(step)) if isinstance(step, set) else step[0]
            value[key] = new
    return value


def _name(base: str, path: Path) -> str:
    return f"{base}@{path!r}" if path else base


def _parsed(name: str) -> tuple[str, Path]:
    if not is_nested(name):
        return name, ()
    at = name.index(_MARK)
    path = ast.literal_eval(name[at + 1 :])
    return name[:at], path


def _built(items: Sequence[tuple[Path, Any]]) -> Any:
    if not items[0][0]:
        return items[0][1]
    first = items[0][0][0]
    below: dict[Any, list[tuple[Path, Any]]] = {}
    for path, value in items:
        key = next(iter(path[0])) if isinstance(first, set) else path[0][0]
        below.setdefault(key, []).append((path[1:], value))
    if isinstance(first, set):
        return {key: _built(inner) for key, inner in below.items()}
    ordered = [_built(below[key]) for key in sorted(below)]
    if isinstance(first, tuple):
        return tuple(ordered)
    return deque(ordered, maxlen=first[1]) if len(first) == 2 else ordered
