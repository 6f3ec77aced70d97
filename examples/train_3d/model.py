"""The model: a decoder-only transformer that can be cut over tensor ranks and over pipeline stages.

Shapes: B sequences, T tokens each, V vocabulary entries, D model width, K width of a head. On a tensor
rank, H is the number of its own heads. This file does not depend on parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab: int
    context: int
    dim: int
    layers: int
    head_dim: int


class Embed(nn.Module):
    """Embeddings of tokens and positions, added."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.dim)
        self.positions = nn.Embedding(config.context, config.dim)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.tokens(tokens_BT) + self.positions(places_T)


class Block(nn.Module):
    """Causal self-attention and an MLP, each behind a norm."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim, self.head_dim = config.dim, config.head_dim
        self.attention_norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.attention_norm(x_BTD)
        # The number of heads is not written down: a tensor rank has some of them.
        q_BHTK, k_BHTK, v_BHTK = (
            f(y_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y_BHTK = scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(gelu(self.up(self.mlp_norm(x_BTD))))


class Head(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.linear = nn.Linear(config.dim, config.vocab, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(self.norm(x_BTD))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = Embed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V]."""
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(x_BTD)


def loss_fn(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean loss in nats per token (0-dim)."""
    return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


TENSOR_PLAN = {
    "embed.tokens": "vocab",
    "blocks.*.[qkv]": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head.linear": "colwise_gather",
}
"""Which layers are cut over tensor ranks, and how. Norms and positions are whole on each."""

ORDER = ["embed", "blocks", "head"]
"""The submodules in the order in which they run, for the pipeline."""
