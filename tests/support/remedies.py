"""Applies a change that the message of a failed allocation prints."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def applied(line: str | None, config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The configuration after the change ``line``, which may be a call on ``model``. None: no change."""
    changed = {**config, "zero_optimization": dict(config["zero_optimization"])}
    if line is not None and line.startswith("model."):
        getattr(model, line.removeprefix("model.").removesuffix("()"))()
    elif line is not None:
        keys = json.loads(line)
        changed["zero_optimization"] |= keys.pop("zero_optimization", {})
        changed |= keys
    return changed
