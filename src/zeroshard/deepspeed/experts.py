"""DeepSpeed's helpers for models with expert layers, as they answer for a model without DeepSpeed's."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def is_moe_param(param: Tensor) -> bool:
    """Whether it belongs to an expert of DeepSpeed's ``MoE`` layer: never, since none can be made."""
    del param
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether there are such layers, and their number of experts."""
    del m
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | tuple[dict[str, Any], ...] | list[dict[str, Any]],
    max_group_size: float | None = None,
) -> list[dict[str, Any]]:
    """The groups unchanged, as a list: no parameter is one of DeepSpeed's experts."""
    del max_group_size  # DeepSpeed cuts groups of experts only
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)
