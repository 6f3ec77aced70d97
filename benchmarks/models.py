"""What do the benchmarks train? Three models, the same object for every system.

A loss is ``model(x, y)``. ``groups`` are the modules that a library which is told by hand what to
gather together should be told (FSDP2's ``fully_shard``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. The defaults have 21 million parameters; embedding and head are two."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 4
    heads: int = 8
    context: int = 128


class Embedding(nn.Embedding):
    """Small values from the start, wherever the parameter is when it gets them."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    """Attention and MLP, pre-norm, biases as in GPT-2: twelve parameters, four of them large."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return hidden


class GPT(nn.Module):
    """Returns the mean cross entropy of the next token; no dropout: runs can be compared."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = Embedding(shape.vocabulary, shape.width)
        self.place = Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def groups(self) -> list[nn.Module]:
        """The blocks, and the two modules that are as large as several of them."""
        return [self.embed, *self.blocks, self.head]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Layer(nn.Module):
    """One linear map beside a residual path, so weak that many of them still learn smoothly."""

    def __init__(self, width: int, strength: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.linear(x), alpha=self.strength)


class Stack(nn.Module):
    """Layers and a squared error: wide ones are all update, many small ones are all overhead."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, 1 / (depth * width**0.5)) for _ in range(depth))

    def groups(self) -> list[nn.Module]:
        """Every layer by itself."""
        return [*self.layers]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x.float() - y.float()).square().mean()


@dataclass(frozen=True)
class GPTTask:
    """A GPT on ``batch`` rows of ``tokens`` tokens per rank and micro-batch."""

    shape: Shape = Shape()
    batch: int = 1

    def model(self) -> GPT:
        """fp32, with values exact in bf16: every precision starts at the same point."""
        return _exact(GPT(self.shape), 1 / (2 * self.shape.layers) ** 0.5)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs ``[batch, context]`` of tokens and their successors, others on every rank.

        Tokens are as frequent as words in a text (Zipf). Training cycles through the pairs: the
        loss falls fast and smoothly, first to the frequencies and then by learning the pairs by
        heart, so that wrong gradients show within a few steps.
        """
        generator = torch.Generator().manual_seed(1000 + rank)
        size = (count, self.batch, self.shape.context + 1)
        places = torch.rand(size, generator=generator, dtype=torch.float64)
        rows = (self.shape.vocabulary**places).long() - 1
        return [(row[:, :-1], row[:, 1:]) for row in rows]


@dataclass(frozen=True)
class StackTask:
    """``depth`` layers of ``width * width`` parameters and hardly any data."""

    width: int
    depth: int
    batch: int = 1

    def model(self) -> Stack:
        """fp32, with values exact in bf16."""
        return _exact(Stack(self.width, self.depth), 1.0)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs of bf16 ``[batch, width]``."""
        generator = torch.Generator().manual_seed(2000 + rank)
        pairs = torch.randn(count, 2, self.batch, self.width, generator=generator).bfloat16()
        return [(x, y) for x, y in pairs]


def _exact(model: M, residual_scale: float) -> M:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                param.normal_(std=0.02 * (residual_scale if residual else 1))
            param.copy_(param.bfloat16())
    return model
