"""First values of a model on the meta device that do not depend on how it is cut.

Every module draws all of its own values from a generator that is seeded with a number and the module's
name. A rank then keeps its part. So any number of tensor ranks starts with the model of one process.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from zeroshard.zero.materialize import check_meta, materialize


def draw_values(model: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter and buffer that is on the meta device memory and its first values.

    The values are those that ``tensor_parallel`` gives the same model with the same ``seed``, on the
    same kind of device. Other parameters, and the state of torch's generators, are not changed.

    Raises:
        UsageError: a module on the meta device has no ``reset_parameters()``; it names it.
    """
    check_meta(model)
    for name, module in model.named_modules():
        draw_own_values(name, module, seed, torch.device(device))


class ValuesByName:
    """Gives the modules of ``model`` their first values one by one, in any order.

    A parameter that several modules share gets the values that its first one draws.
    """

    def __init__(self, model: nn.Module, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed, device
        self._modules = dict(model.named_modules())
        self._first: dict[int, str] = {}  # by id of a meta tensor: the first module that has it
        for name, module in self._modules.items():
            for tensor in own_tensors(module):
                if tensor.is_meta:
                    self._first.setdefault(id(tensor), name)

    def draw(self, name: str, module: nn.Module) -> None:
        """See :func:`draw_own_values`. Draws modules before, with which this one shares parameters."""
        if not is_meta(module):
            return
        others = {
            self._first.get(id(tensor), name) for tensor in own_tensors(module) if tensor.is_meta
        }
        for other in sorted(others - {name}, key=list(self._modules).index):
            self.draw(other, self._modules[other])
        draw_own_values(name, module, self._seed, self._device)


def draw_own_values(name: str, module: nn.Module, seed: int, device: torch.device) -> None:
    """Give the module's own parameters and buffers on the meta device memory and their first values.

    ``reset_parameters`` of the module fills them, at their full size.
    """
    if not is_meta(module):
        return
    if device.type == "cpu":
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed_of(seed, name))
            materialize(module, device)
        return
    index = torch.empty(0, device=device).device.index
    with torch.random.fork_rng([index], device_type=device.type):
        torch.manual_seed(seed_of(seed, name))
        materialize(module, device)


def is_meta(module: nn.Module) -> bool:
    """Whether a parameter or buffer of the module itself is on the meta device."""
    return any(tensor.is_meta for tensor in own_tensors(module))


def own_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of the module itself."""
    own = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in own if tensor is not None]


def seed_of(seed: int, name: str) -> int:
    """The seed of the module ``name``, a number below 2**63.

    >>> seed_of(1, "blocks.0") == seed_of(1, "blocks.0") != seed_of(1, "blocks.1")
    True
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
