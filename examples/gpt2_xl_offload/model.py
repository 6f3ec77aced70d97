"""The model: GPT-2, with learned positions, LayerNorm before each part, GELU and a tied embedding.

Shapes: B sequences, T tokens each, V vocabulary entries, D model width, H heads, K = D / H.
This file does not depend on sharding or offload.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class GPT2Config:
    dim: int
    layers: int
    heads: int
    vocab: int = 50257
    context: int = 1024


SIZES = {
    "smoke": GPT2Config(dim=128, layers=3, heads=4, vocab=512, context=128),
    "small": GPT2Config(dim=768, layers=12, heads=12),
    "medium": GPT2Config(dim=1024, layers=24, heads=16),
    "large": GPT2Config(dim=1280, layers=36, heads=20),
    "xl": GPT2Config(dim=1600, layers=48, heads=25),
}


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)


class Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        D = config.dim
        self.heads = config.heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = Linear(D, 3 * D), Linear(D, D)
        self.up, self.down = Linear(D, 4 * D), Linear(4 * D, D)

    def forward(self, x_BTD: Tensor) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        y_BHTK = scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.down(gelu(self.up(self.mlp_norm(x_BTD)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.tokens = Embedding(config.vocab, config.dim)
        self.positions = Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross entropy in nats per token."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places_T)
        for block in self.blocks:  # only each block's input is kept, the rest is computed again
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        logits_BTV = self.norm(x_BTD) @ self.tokens.weight.t()
        return cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
