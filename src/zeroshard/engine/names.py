"""Under which names does a module keep what a checkpoint or an export has to hold?"""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """What ``module.state_dict()`` has besides parameters, without touching these."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def other_names(module: nn.Module) -> dict[str, list[str]]:
    """The further names of tied parameters, by their first one."""
    first = {id(param): name for name, param in module.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first[id(param)] != name:
            found.setdefault(first[id(param)], []).append(name)
    return found
