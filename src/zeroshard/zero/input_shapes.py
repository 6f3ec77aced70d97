"""Remembers what a model got in its last forward as shapes, so that no tensor stays alive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SIMPLE = (int, float, bool, str, bytes, type(None), torch.dtype)


@dataclass(slots=True)  # not frozen, which would take twice the time
class Shape:
    """What is remembered of a tensor."""

    sizes: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Unknown:
    """Stands for an object that is not remembered, because it could hold tensors. ``kind``: its class."""

    kind: str


def shapes_of(value: Any) -> Any:
    """``value`` with a :class:`Shape` for each tensor in lists, tuples and dicts.

    It runs before every forward, and takes one to two microseconds per tensor.

    >>> shapes_of([torch.ones(2, 3), {"scale": 0.5}])
    [Shape(sizes=torch.Size([2, 3]), dtype=torch.float32, requires_grad=False), {'scale': 0.5}]
    """
    if isinstance(value, Tensor):
        return Shape(value.shape, value.dtype, value.requires_grad)
    if isinstance(value, _SIMPLE):
        return value
    kind = type(value)
    if kind is dict:
        return {key: shapes_of(each) for key, each in value.items()}
    if kind is list or kind is tuple:
        return kind(map(shapes_of, value))
    return Unknown(kind.__name__)
