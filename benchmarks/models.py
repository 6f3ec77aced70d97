"""What do the benchmarks train? One decoder-only transformer, the same object for every system."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT. The defaults have 29.6 million parameters (embedding and head are one)."""

    vocabulary: int = 8192
    width: int = 512
    layers: int = 8
    heads: int = 8
    context: int = 128


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
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.place = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.embed.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(shape: Shape, seed: int = 0) -> GPT:
    """A GPT in fp32 whose values are exact in bf16: every precision starts at the same point."""
    torch.manual_seed(seed)
    model = GPT(shape)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                param.normal_(std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)
            param.copy_(param.bfloat16())
    return model


def batches(shape: Shape, *, rank: int, tokens: int, count: int = 8) -> list[tuple[Tensor, Tensor]]:
    """``count`` pairs ``[1, tokens]`` of tokens and their successors, others on every rank.

    Tokens are as frequent as words in a text (Zipf). Training cycles through the pairs: the loss
    falls fast and smoothly, first to the frequencies and then by learning the pairs by heart, so
    that wrong gradients show within a few steps.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    places = torch.rand(count, tokens + 1, generator=generator, dtype=torch.float64)
    rows = (shape.vocabulary**places).long() - 1
    return [(row[None, :-1], row[None, 1:]) for row in rows]
