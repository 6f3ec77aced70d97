"""A small model that is cut into pipeline stages, its data, and plain training of it in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, DEPTH, LENGTH = 16, 16, 6, 5
MICRO_BATCH, COUNT, DP = 2, 4, 2
ORDER = ("embed", "layers", "norm", "head")
LR, CLIP = 1e-2, 0.05


class Block(nn.Module):
    """A residual perceptron; ``recompute``: with activation checkpointing."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def inner(self, x_BTD: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(self.norm(x_BTD)).tanh())
        return x_BTD + y

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.inner, x_BTD, use_reentrant=False)
        return self.inner(x_BTD)


class Decoder(nn.Module):
    """Embedding, blocks, head.

    ``tied``: the head has the weight of the embedding, and the fifth block one of the first block.
    """

    def __init__(self, recompute: bool = False, depth: int = DEPTH, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(recompute) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embed.weight
            self.layers[4].up.weight = self.layers[0].up.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


def loss_fn(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())


def batches(step: int, dp_rank: int, length: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of one data-parallel rank."""
    made = torch.Generator().manual_seed(1000 * step + dp_rank)
    shape = (COUNT, MICRO_BATCH, length)
    tokens, labels = (torch.randint(VOCABULARY, shape, generator=made) for _ in range(2))
    return list(zip(tokens, labels, strict=True))


def data(steps: int, dp_rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Those of several steps."""
    for step in range(steps):
        yield from batches(step, dp_rank)


def train_plainly(
    steps: int, tied: bool = False, dp_size: int = DP
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Parameters, losses and norms of plain PyTorch in fp64 on the global batch."""
    model = Decoder(tied=tied).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(steps):
        every = [batch for rank in range(dp_size) for batch in batches(step, rank)]
        loss = torch.stack([loss_fn(model(x), y) for x, y in every]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss))
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def config(stage: int, **keys: Any) -> dict[str, Any]:
    """AdamW with clipping that is in effect; every block is a unit."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": CLIP,
        "units": ["Block", "Embedding"],
        "zero_optimization": {"stage": stage, **keys.pop("zero_optimization", {})},
        **keys,
    }


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR)


def bubble(ranks, per_rank, micro_batches):
    """The part of a step in which a rank waits, if stages take equally long and messages no time."""
    return (ranks - 1) / (per_rank * micro_batches + ranks - 1)
