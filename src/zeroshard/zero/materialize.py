"""Gives parameters on the meta device memory and their first values.

Works module by module, right before a module's unit takes its parameters. The module gets memory, and its
own ``reset_parameters`` fills it, as its constructor would have done.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zeroshard.errors import UsageError


def check_meta(model: nn.Module) -> None:
    """Check that all modules on the meta device can compute their first values.

    Raises:
        UsageError: some have no ``reset_parameters``; it names them.
    """
    mute = {
        name or "the model itself": type(module).__name__
        for name, module in model.named_modules()
        if _on_meta(module) and not hasattr(module, "reset_parameters")
    }
    if mute:
        first, kind = next(iter(mute.items()))
        more = f", and {len(mute) - 1} more modules," if len(mute) > 1 else ""
        raise UsageError(
            f"module {first!r} ({kind}){more} on the meta device without reset_parameters(), so nobody "
            "knows the initial values. Add that method (for buffers too), build the model under "
            "zeroshard.zero.Init instead, or load weights before initialize()."
        )


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give the module's own meta parameters and buffers memory and values. Others are not changed.

    Parameters keep their identity, because ties and optimizers built earlier refer to the objects.
    """
    empty = _on_meta(module)
    if not empty:
        return
    for leaf, tensor in empty.items():
        if isinstance(tensor, nn.Parameter):
            if tensor.is_meta:  # otherwise it was swapped under another name already
                values = torch.empty_like(tensor, device=device)
                real = nn.Parameter(values, requires_grad=tensor.requires_grad)
                real.__dict__.update(tensor.__dict__)
                torch.utils.swap_tensors(tensor, real)
        else:
            module._buffers[leaf] = torch.empty_like(tensor, device=device)
    # reset_parameters must not change parameters that have values (tied, loaded or sharded).
    kept = {n: p for n, p in module._parameters.items() if p is not None and n not in empty}
    for leaf, param in kept.items():
        stand_in = torch.empty(param.shape, dtype=param.dtype, device=device)
        module._parameters[leaf] = nn.Parameter(stand_in, requires_grad=param.requires_grad)
    try:
        with torch.no_grad():
            module.reset_parameters()  # type: ignore[operator]  # see check_meta
    finally:
        module._parameters.update(kept)


def _on_meta(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None and tensor.is_meta}
