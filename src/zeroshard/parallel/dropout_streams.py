"""Random numbers in regions whose activations are cut over features: each tensor rank draws its own.

Outside of such a region, activations are equal on all tensor ranks, so dropout must draw equal masks
there. Inside, each rank has other features or heads, and equal generators would drop the same positions
in all of them. So a region starts with one draw from the common generator. This number and the tensor
rank seed the generators for the region. At its end they continue where they were.

A region's numbers depend on the state of the common generator only. Activation checkpointing, which
restores that state, therefore draws them again, and a checkpoint of the run needs no further state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from zeroshard.device.choice import ops_of

_ODD = 0x9E3779B97F4A7C15  # the golden ratio in 64 bits: seeds of neighbouring ranks differ in many bits


class RegionStreams:
    """The generators of one rank for the regions of one model. ``rank``: in its tensor group.

    The CPU's generator and that of ``device`` change together. A region costs a few microseconds on the
    CPU, and no wait for an accelerator.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._ops = ops_of(device)
        self._common: tuple[Tensor, Tensor | None] | None = None

    def open(self) -> None:
        """Begin a region, unless one is open."""
        if self._common is not None:
            return
        draw = int(torch.randint(2**62, (), device="cpu"))
        seed = (draw + (self._rank + 1) * _ODD) % 2**63
        self._common = torch.default_generator.get_state(), self._ops.rng_state()
        torch.default_generator.manual_seed(seed)
        self._ops.manual_seed(seed)

    def close(self) -> None:
        """End the region, if one is open."""
        if self._common is None:
            return
        (common, on_device), self._common = self._common, None
        torch.default_generator.set_state(common)
        if on_device is not None:
            self._ops.set_rng_state(on_device)


def draws(module: nn.Module) -> bool:
    """Whether the module draws random numbers, as layers of torch or attributes of models say."""
    rates = [getattr(module, name, 0.0) for name in ("p", "dropout", "attention_dropout")]
    return any(isinstance(rate, float) and rate > 0.0 for rate in rates)


def starts_region(name: str, styles: Mapping[str, str]) -> bool:
    """Whether a region begins after the layer: it is column-parallel, and a row-parallel layer ends it.

    The row-parallel layer comes later in the model. The two belong to one module, or to two neighbouring
    ones, such as ``attention.self.query`` and ``attention.output.dense``.

    >>> plan = {"mlp.up": "colwise", "mlp.down": "rowwise", "head": "colwise"}
    >>> [starts_region(name, plan) for name in plan]
    [True, False, False]
    """
    if not styles[name].startswith("colwise") or styles[name] == "colwise_gather":
        return False
    near, names = _owners(name), list(styles)
    later = names[names.index(name) :]
    return any(styles[other] == "rowwise" and near & _owners(other) for other in later)


def _owners(name: str) -> set[str]:
    parent = name.rpartition(".")[0]
    return {parent, parent.rpartition(".")[0]} - {""} or {""}
