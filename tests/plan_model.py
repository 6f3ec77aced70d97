"""A model to plan whose names are scripts for a browser."""

from __future__ import annotations

import torch
from torch import Tensor, nn

SCRIPT = "<script>ran = 1</script><img src=x onerror='ran = 1'>"
DOLLAR = "$\\frac$" + "a" * 200
WIDTH = 64


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in (SCRIPT, DOLLAR)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x.repeat(1, 4).exp().mean()


def factory() -> tuple[nn.Module, tuple[Tensor, None]]:
    """The model and a batch."""
    return Net(), (torch.empty(256, WIDTH), None)


def config(stage: int = 3) -> dict[str, object]:
    """A configuration for it, with the script in it."""
    return {
        "train_micro_batch_size_per_gpu": 256, "unit_min_numel": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "wandb": {"enabled": False, "project": SCRIPT},
    }  # fmt: skip
