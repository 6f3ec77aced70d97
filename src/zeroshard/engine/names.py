"""Names under which a module has the tensors of a checkpoint or an export."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The entries of ``module.state_dict()`` that are no parameters. Does not read parameters."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def other_names(module: nn.Module) -> dict[str, list[str]]:
    """First name of a tied parameter -> its other names."""
    first = {id(param): name for name, param in module.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first[id(param)] != name:
            found.setdefault(first[id(param)], []).append(name)
    return found
