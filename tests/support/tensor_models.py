"""A small GPT for tests of tensor parallelism, and the plans that cut it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, LENGTH = 33, 16, 4, 8  # the vocabulary divides by no number of ranks in tests


class Attention(nn.Module):
    """Causal attention that reads its numbers of heads from attributes."""

    def __init__(self, width: int, heads: int, kv_heads: int | None) -> None:
        super().__init__()
        self.n_head, self.head_dim = heads, width // heads
        if kv_heads is not None:
            self.num_kv_heads = kv_heads
        rows = self.head_dim * (kv_heads or heads)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, rows, bias=False)  # its gradient would be 0
        self.v = nn.Linear(width, rows)
        self.o = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        kv_heads = getattr(self, "num_kv_heads", self.n_head)
        q, k, v = (
            layer(x).view(batch, length, heads, self.head_dim).transpose(1, 2)
            for layer, heads in ((self.q, self.n_head), (self.k, kv_heads), (self.v, kv_heads))
        )
        gqa = kv_heads != self.n_head
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int | None, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width), MLP(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    """Token and position embeddings, pre-norm blocks, a norm and a head, which may be tied."""

    def __init__(
        self,
        *,
        tied: bool = False,
        hidden: int = 24,
        depth: int = 2,
        kv_heads: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, **options)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, kv_heads, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


BLOCKS = {
    "blocks.*.attn.[qkv]": "colwise",
    "blocks.*.attn.o": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
}
VOCABULARY = {"embed": "vocab", "head": "colwise_gather"}
STREAM = {"positions": "replicate", "blocks.*.norm[12]": "sequence", "norm": "sequence"}
PLANS = {
    "blocks": BLOCKS,
    "vocabulary": BLOCKS | VOCABULARY,
    "sequence": BLOCKS | VOCABULARY | STREAM,
}


def tiny_gpt(seed: int = 0, **options: Any) -> TinyGPT:
    """A model in float64, equal in every process that passes the same arguments."""
    torch.manual_seed(seed)
    return TinyGPT(**options).double()


def tokens(seed: int, batch: int = 3, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Inputs and labels ``[batch, length]``; some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (batch, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, :3] = -100
    return ids[:, :-1], labels


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
