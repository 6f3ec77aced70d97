"""How does a parameter on the meta device get its first values?

Module by module, right before its unit is sharded: the module gets real memory and its own
``reset_parameters`` fills it, as its constructor would have done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from zeroshard.errors import UsageError


def materialize(
    modules: Mapping[str, nn.Module], fqns: Iterable[str], device: torch.device
) -> dict[int, nn.Parameter]:
    """Give the modules that hold ``fqns`` real parameters, if theirs are on the meta device.

    Tied parameters stay tied. Returns what replaced what: id of the old parameter -> the new one.
    Raises :class:`UsageError` naming the modules that cannot initialise themselves.
    """
    replaced: dict[int, nn.Parameter] = {}
    filled: list[nn.Module] = []
    for fqn in fqns:
        module = modules[fqn.rpartition(".")[0]]
        if not any(p is not None and p.is_meta for p in module._parameters.values()):
            continue
        for old in [p for p in module._parameters.values() if p is not None and p.is_meta]:
            values = torch.empty_like(old, device=device)
            new = nn.Parameter(values, requires_grad=old.requires_grad)
            replaced[id(old)] = new
            for holder in modules.values():
                for name, param in holder._parameters.items():
                    if param is old:
                        holder._parameters[name] = new
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = torch.empty_like(buffer, device=device)
        filled.append(module)
    for module in filled:
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            name = next(fqn for fqn, m in modules.items() if m is module)
            raise UsageError(
                f"module {name!r} ({type(module).__name__}) is on the meta device and has no "
                "reset_parameters(), so nobody knows its initial values. Add that method, build the "
                "model under zeroshard.zero.Init instead, or load weights before initialize()."
            )
        with torch.no_grad():
            reset()
    return replaced
