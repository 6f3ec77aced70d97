"""The models and data of the benchmarks: a GPT and a stack of linear layers.

``model(x, y)`` returns the loss. ``groups()`` returns the modules to shard one by one, for libraries that
are given them by hand (FSDP2's ``fully_shard``).
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
    """The sizes that define a GPT."""

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
    """Sizes of a GPT. The defaults have 21 million parameters, with separate embedding and head."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 4
    heads: int = 8
    context: int = 128


class Embedding(nn.Embedding):
    """An embedding that initializes itself with small values, also after the meta device.

    The values must not be smaller. The norm that follows depends on the relative change of a vector, and
    for very small vectors one update is a large relative change. The loss then jumps, in a step that
    depends on rounding.
    """

    std = 0.1

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class TiedEmbedding(Embedding):
    """An embedding that is also the output layer. Its values are smaller, so that no logit is large."""

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
    """Returns the mean cross entropy of the next token. It has no dropout, so that runs can be compared.

    ``tied``: the embedding is also the head. ``recompute``: activation checkpointing of each block.
    """

    def __init__(self, shape: Sizes, *, tied: bool = False, recompute: bool = False) -> None:
        super().__init__()
        table = TiedEmbedding if tied else Embedding
        self.recompute = recompute
        self.embed = table(shape.vocabulary, shape.width)
        self.position = table(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = None if tied else nn.Linear(shape.width, shape.vocabulary, bias=False)

    def groups(self) -> list[nn.Module]:
        """The blocks. If not tied, embedding and head too: each is as large as several blocks."""
        return [*self.blocks] if self.head is None else [self.embed, *self.blocks, self.head]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        recompute = self.recompute and torch.is_grad_enabled()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        x = self.norm(x)
        logits = functional.linear(x, self.embed.weight) if self.head is None else self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Layer(nn.Module):
    """A linear layer with a residual connection, scaled by ``strength``.

    The scale is small enough that a stack of many layers learns smoothly. It is large enough that bf16
    does not round the contribution of a layer to zero. Otherwise the losses would never change.
    """

    strength = 0.025

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.linear(x), alpha=self.strength)


class Stack(nn.Module):
    """Layers and a squared error. With wide layers the update dominates, with many small ones the
    overhead per layer."""

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
        """fp32, with values that are exact in bf16: every precision starts with the same values."""
        return _exact(lambda: GPT(self.shape), 1 / (2 * self.shape.layers) ** 0.5)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs ``[batch, context]``, different on every rank.

        Training cycles through the pairs. The loss falls fast and smoothly: the model learns the token
        frequencies first, then it memorizes the pairs. Wrong gradients show within a few steps.
        """
        return text(self.shape, self.batch, count, seed=1000 + rank)


@dataclass(frozen=True)
class StackTask:
    """``depth`` layers of ``width * width`` parameters, on very small batches."""

    width: int
    depth: int
    batch: int = 1

    def model(self) -> Stack:
        """fp32, with values that are exact in bf16."""
        return _exact(lambda: Stack(self.width, self.depth), 1.0)

    def data(self, rank: int, count: int) -> list[Batch]:
        """``count`` pairs of bf16 ``[batch, width]``."""
        generator = torch.Generator().manual_seed(2000 + rank)
        pairs = torch.randn(count, 2, self.batch, self.width, generator=generator).bfloat16()
        return [(x, y) for x, y in pairs]


def text(shape: Sizes, batch: int, count: int, *, seed: int) -> list[Batch]:
    """``count`` pairs ``[batch, context]`` of tokens and their successors.

    Token frequencies follow Zipf's law, like words in a text.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (count, batch, shape.context + 1)
    uniform = torch.rand(size, generator=generator, dtype=torch.float64)
    rows = (shape.vocabulary**uniform).long() - 1
    return [(row[:, :-1], row[:, 1:]) for row in rows]


def _exact(build: Callable[[], M], residual_scale: float) -> M:
    """Draw the weight matrices anew, except those of embeddings. Residual outputs are scaled by
    ``residual_scale``. Round all values to bf16."""
    torch.manual_seed(0)  # before the constructors, which draw the biases
    model = build()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2 and not name.startswith(("embed.", "position.")):
                residual = name.endswith(("out.weight", "down.weight"))
                param.normal_(std=0.02 * (residual_scale if residual else 1))
            param.copy_(param.bfloat16())
    return model
