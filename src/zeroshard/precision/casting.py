"""Casts nested inputs of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of a nested structure in ``dtype``; everything else as it is."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, dict):
        return {key: cast_floats(value, dtype) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(cast_floats(item, dtype) for item in tree)
    return tree
