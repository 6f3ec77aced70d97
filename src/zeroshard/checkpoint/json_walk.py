"""A walk over nested values, to or from JSON: its position, its limits and its errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, Union

import torch

from zeroshard.errors import CheckpointError

JsonTree: TypeAlias = Union[bool, int, float, str, "list[JsonTree]", "dict[str, JsonTree]", None]
"""A value for ``json.dumps(tree, allow_nan=False)``."""

MAX_DEPTH = 64
"""Largest nesting of containers; far below the limit of Python's stack."""

MAX_VALUES = 10_000_000
"""Largest number of values. Lists that hold one list twice, many levels deep, have too many to write."""

STORED = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
}  # dtypes that every safetensors file can hold  # fmt: skip
STORED_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.complex32, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    )
}  # fmt: skip
DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set)
}
NUMPY_DTYPE = re.compile(r"[<>|][biufcmMSU][0-9]{1,6}(\[[0-9]*[a-zA-Z]+\])?")
ALLOW = '"checkpoint": {"allow_pickle": true}'


class Walk:
    """A walk over a tree: its position, and the number of values seen."""

    def __init__(self, where: str, allow_pickle: bool) -> None:
        self.where = where
        self.allow_pickle = allow_pickle
        self.values_seen = 0
        self.steps: list[tuple[str, Any]] = []  # the path: kind of each step, and its key

    def value(self, value: Any) -> Any:
        """The encoded, or decoded, value."""
        raise NotImplementedError

    def below(self, step: str, key: Any, value: Any) -> Any:
        """The value one step down. An error ends the walk, and leaves the step in ``steps``."""
        self.values_seen += 1
        if len(self.steps) >= MAX_DEPTH:
            raise self.error(f"is nested in more than {MAX_DEPTH} containers. Use fewer levels")
        if self.values_seen > MAX_VALUES:
            raise self.error(
                f"comes after {MAX_VALUES} other values: too many, or many references to the same "
                "values. Put numbers into a tensor or an array"
            )
        self.steps.append((step, key))
        result = self.value(value)
        self.steps.pop()
        return result

    def items(self, values: Iterable[Any]) -> list[Any]:
        """A sequence, value by value."""
        return [self.below("item", i, item) for i, item in enumerate(values)]

    def error(self, text: str) -> CheckpointError:
        """An error about the current value. ``text`` follows the value's path."""
        path = "".join(_written[step](key) for step, key in self.steps)
        return CheckpointError(f"{self.where}{path} {text}.")


def shown(key: Any) -> str:
    """A key in a message, cut. An int of 5000 digits has no ``repr``."""
    if type(key) is str:
        return repr(key if len(key) <= 40 else key[:40] + "...")
    if type(key) in (bool, float, type(None)) or (type(key) is int and key.bit_length() <= 64):
        return repr(key)
    return f"<{type(key).__name__}>"


_written: dict[str, Callable[[Any], str]] = {
    "item": lambda key: f"[{shown(key)}]",
    "attribute": lambda key: f".{key}" if type(key) is str and len(key) <= 40 else f".{shown(key)}",
    "key": lambda i: f" (key {i})",
    "member": lambda i: f" (member {i})",
}


def kind_of(value: Any) -> str:
    """The class of a value in a message, with its article."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
