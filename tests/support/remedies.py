"""What tests of printed changes share: a model that can recompute, changes applied, a limit of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zeroshard.planner.allocations import Allocations
from zeroshard.planner.changes import changed_keys, merged


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Recomputing(nn.Module):
    """A model whose blocks can recompute their activations, as those of Transformers."""

    blocks: nn.ModuleList
    is_gradient_checkpointing = False

    def gradient_checkpointing_enable(self) -> None:
        self.is_gradient_checkpointing = True

    def through(self, x: Tensor) -> Tensor:
        """``x`` after all blocks."""
        for block in self.blocks:
            recomputed = self.is_gradient_checkpointing
            x = checkpoint(block, x, use_reentrant=False) if recomputed else block(x)
        return x


class Chain(Recomputing):
    """``depth`` blocks and nothing else, with the same values each time."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        return self.through(x)


def applied(line: str | None, config: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """The configuration after the change ``line``, which may be a call on ``model``. None: no change."""
    line = line or "{}"
    if line.startswith("model."):
        getattr(model, line.removeprefix("model.").removesuffix("()"))()
    return merged(config, changed_keys(line))


class Limited(Allocations):
    """Refuses allocations beyond a limit, as an allocator does."""

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__(lambda *_: None, real=True)
        self.limit, self.peak = limit, 0

    def _add(self, key: int, tensor: Tensor, nbytes: int, op: str, module: str) -> None:
        super()._add(key, tensor, nbytes, op, module)
        self.peak = max(self.peak, self._live)
        if nbytes and self._live > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes / 2**20:.2f} MiB."
            )
