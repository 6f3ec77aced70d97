"""What do the benchmarks train? Two kinds of models, the same object for every system.

A loss is ``model(x, y)``. ``groups`` are the modules that a library which is told by hand what to
gather together should be told (FSDP2's ``fully_shard``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Batch = tuple[Tensor, Tensor]
M = TypeVar("M", bound=nn.Module)


class Sizes(Protocol):
    """What a GPT has to be told."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def context(self) -> int: ...


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. The defaults have 21 million parameters; embedding and head are two."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 4
    heads: int = 8
    context: int = 128


class Embedding(nn.Embedding):
    """Small values from the start, wherever the parameter is when it gets them.

    Not smaller: a norm that follows turns a change of so small a vector into one of the same share,
    and the loss then jumps by itself; which step it does that in is a matter of rounding.
    """

    std = 0.1

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TiedEmbedding(Embedding):
    """A table that is also the output layer: smaller, so that no logit is large."""

    std = 0.02


class Block(nn.Module):
    """Attention and MLP, pre-norm, biases as in GPT-2: twelve parameters, four of them large."""

    def __init__(self, shape: Sizes) -> None:
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
    """Returns the mean cross entropy of the next token; no dropout: runs can be compared.

    ``tied``: the embedding is also the head. ``recompute``: of the blocks only the inputs are kept.
    """

    def __init__(self, shape: Sizes, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        table = TiedEmbedding if tied else Embedding
        self.recompute = recompute
        self.embed = table(shape.vocabulary, shape.width)
        self.place = table(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = None if tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    def groups(self) -> list[nn.Module]:
        """The blocks, and the two modules that are as large as several of them, unless they are one."""
        return [*self.blocks] if self.head is None else [self.embed, *self.blocks, self.head]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x = self.norm(x)
        logits = functional.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Layer(nn.Module):
    """One linear map beside a residual path.

    So weak that many of them still learn smoothly, and strong enough that bf16 does not round what it
    adds away: losses of layers that change nothing would always be the same.
    """

    strength = 0.025

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.linear(x), alpha=self.strength)


class Stack(nn.Module):
    """Layers and a squared error: wide ones are all update, many small ones are all overhead."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

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
        return _exact(lambda: GPT(self.shape), 1 / (2 * self.shape.layers) ** 0.5)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs ``[batch, context]``, others on every rank.

        Training cycles through the pairs: the loss falls fast and smoothly, first to the frequencies
        and then by learning the pairs by heart, so that wrong gradients show within a few steps.
        """
        return text(self.shape, self.batch, count, seed=1000 + rank)


@dataclass(frozen=True)
class StackTask:
    """``depth`` layers of ``width * width`` parameters and hardly any data."""

    width: int
    depth: int
    batch: int = 1

    def model(self) -> Stack:
        """fp32, with values exact in bf16."""
        return _exact(lambda: Stack(self.width, self.depth), 1.0)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs of bf16 ``[batch, width]``."""
        generator = torch.Generator().manual_seed(2000 + rank)
        pairs = torch.randn(count, 2, self.batch, self.width, generator=generator).bfloat16()
        return [(x, y) for x, y in pairs]


def text(shape: Sizes, batch: int, count: int, *, seed: int) -> list[Batch]:
    """``count`` pairs ``[batch, context]`` of tokens and their successors.

    Tokens are as frequent as words in a text (Zipf).
    """
    generator = torch.Generator().manual_seed(seed)
    size = (count, batch, shape.context + 1)
    places = torch.rand(size, generator=generator, dtype=torch.float64)
    rows = (shape.vocabulary**places).long() - 1
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def _exact(build: Callable[[], M], residual_scale: float) -> M:
    """Weights of layers by their place, everything else as its constructor leaves it."""
    torch.manual_seed(0)  # before the constructors: biases are theirs
    model = build()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2 and not name.startswith(("embed.", "place.")):
                residual = name.endswith(("out.weight", "down.weight"))
                param.normal_(std=0.02 * (residual_scale if residual else 1))
            param.copy_(param.bfloat16())
    return model
