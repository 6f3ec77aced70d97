"""Lists of layers for ``PipelineModule``, their data, and plain training of them in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.pipeline_models import CLIP, COUNT, DP, LR, MICRO_BATCH, WIDTH
from zeroshard.deepspeed.helpers import set_random_seed
from zeroshard.deepspeed.pipeline_layers import LayerSpec

BASE_SEED = 7


class Mixed(nn.Module):
    """Takes and gives a pair: activations, and a mask that is passed on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=torch.float64)
        self.drop = nn.Dropout(0.25)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = pair
        return x + self.drop(self.inner(x).tanh()) * mask, mask


def first(pair: tuple[Tensor, Tensor]) -> Tensor:
    """The activations of a pair."""
    return pair[0]


def layers(blocks: int = 5) -> list[Any]:
    """Specs, a module, functions, and a layer that writes into its input."""
    torch.manual_seed(BASE_SEED)
    head = nn.Linear(WIDTH, 3, dtype=torch.float64)
    linear = LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [
        *(LayerSpec(Mixed, WIDTH) for _ in range(blocks)),
        first,
        LayerSpec(nn.ReLU, inplace=True),
        linear,
        lambda x: x.sin(),
        head,
    ]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean over samples."""
    return nn.functional.cross_entropy(outputs, labels)


def batches(step: int, dp_rank: int) -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    """The micro-batches of one data-parallel rank."""
    draw = torch.Generator().manual_seed(1000 * step + dp_rank)
    found = []
    for _ in range(COUNT):
        x = torch.randn(MICRO_BATCH, WIDTH, dtype=torch.float64, generator=draw)
        mask = torch.rand(MICRO_BATCH, 1, generator=draw) < 0.7
        found.append(((x, mask), torch.randint(3, (MICRO_BATCH,), generator=draw)))
    return found


def data(steps: int, dp_rank: int) -> Iterator[Any]:
    """Those of several steps."""
    for step in range(steps):
        yield from batches(step, dp_rank)


class Plain(nn.Module):
    """The layers in one process, seeded as ``PipelineModule(seed_layers=True)`` says."""

    def __init__(self, specs: Sequence[Any]) -> None:
        super().__init__()
        self.run = []
        for at, spec in enumerate(specs):
            set_random_seed(BASE_SEED + at)
            layer = spec.build() if isinstance(spec, LayerSpec) else spec
            self.run.append(layer)
            if isinstance(layer, nn.Module):
                self.add_module(str(at), layer)

    def forward(self, value: Any, forwards: int) -> Tensor:
        """``forwards``: how many the same copy of the model has run before."""
        for at, layer in enumerate(self.run):
            set_random_seed(BASE_SEED * (forwards + 2) + at)
            value = layer(value)
        return value


def train_plainly(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses of plain PyTorch on the global batch."""
    model = Plain(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(steps):
        losses.append(0.0)
        for rank in range(DP):
            for at, (inputs, labels) in enumerate(batches(step, rank)):
                loss = loss_fn(model(inputs, step * COUNT + at), labels) / (DP * COUNT)
                loss.backward()
                losses[-1] += float(loss)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, losses
