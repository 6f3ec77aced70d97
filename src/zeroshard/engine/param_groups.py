"""What ranks compare of the param groups of their optimizers, before training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_NOT_OPTIONS = ("params", "param_names")


def groups_in_words(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The options of all param groups of a pipeline, whose ranks make their optimizers by themselves.

    All stages need the same groups: a checkpoint has one list of options, and says for each parameter
    which entry is its own.
    """
    groups = optimizer.param_groups
    count = "number of param groups (a pipeline stage without parameters of a group needs it empty)"
    return {
        "class of the optimizer": type(optimizer).__name__,
        count: str(len(groups)),
        **{
            f"{name} of param group {at}": text
            for at, group in enumerate(groups)
            for name, text in options_in_words(group).items()
        },
    }


def options_in_words(group: Mapping[str, Any]) -> dict[str, str]:
    """The options of a param group whose values can be compared between ranks, by name.

    Left out are objects that are neither numbers, texts, tensors nor lists of these: their texts may
    contain addresses. Waits for the device if an option is a tensor there.
    """
    words = {name: _words(group[name]) for name in sorted(group) if name not in _NOT_OPTIONS}
    return {name: text for name, text in words.items() if text is not None}


def _words(value: Any) -> str | None:
    if isinstance(value, Tensor):  # its text has the device, which differs between ranks
        return f"tensor {value.tolist()!r}"
    if isinstance(value, (list, tuple)):
        parts = [_words(each) for each in value]
        return None if None in parts else f"({', '.join(map(str, parts))})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return None
