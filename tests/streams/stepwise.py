"""Pieces of the tests that train on a pretended device step by step, outside the scenarios."""

from __future__ import annotations

import torch
from kit import DTYPES
from scenarios import WIDTH
from zeroshard_testing.streams import Watch

OFFLOADS = {
    "none": {},
    "optimizer": {"offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "delayed": {"offload_optimizer": {"device": "cpu", "pin_memory": True, "delayed_update": True}},
    "parameters": {
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}
"""Keys of ``zero_optimization``."""


def batch(at: int, device: str, precision: str) -> torch.Tensor:
    """The input of micro-batch ``at``."""
    x_BD = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + at)
    return x_BD.to(DTYPES[precision]).to(device)


def loss_of(engine, x_BD):
    return engine(x_BD).float().square().mean()


def report(watch: Watch) -> str:
    """What was found, as the message of a failure."""
    return "\n".join(map(str, watch.findings))
