"""The model: a decoder-only transformer with RMSNorm, rotary positions and SwiGLU.

Shapes: B sequences, T tokens each, V vocabulary entries, D model width, H heads, K = D / H.
This file does not depend on sharding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    vocab: int = 2048
    context: int = 256
    dim: int
    layers: int
    heads: int
    tied: bool = False  # one matrix for the embedding and the output
    checkpoint: bool = False  # keep only the input of each block; recompute in backward

    @property
    def hidden(self) -> int:
        """Width of the feed-forward part: 8/3 of ``dim``, in whole multiples of 64."""
        return 64 * round(self.dim * 8 / 3 / 64)


# The last three are named for their size with a vocabulary of 32768.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"dim": 64, "layers": 2, "heads": 2},
    "small": {"dim": 192, "layers": 4, "heads": 3},
    "125m": {"dim": 768, "layers": 12, "heads": 12},
    "1b": {"dim": 2048, "layers": 18, "heads": 16},
    "7b": {"dim": 4096, "layers": 32, "heads": 32},
}


class Linear(nn.Linear):
    """A matrix without bias, drawn so that the output has the scale of the input.

    The values are drawn while the layer is built, so that a sharded construction can let go of
    each layer before it builds the next.
    """

    def __init__(self, inputs: int, outputs: int, *, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain / math.sqrt(self.in_features))


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.embedding_dim))


class Attention(nn.Module):
    """Causal self-attention; queries and keys are turned by their position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.dim, 3 * config.dim)
        self.out = Linear(config.dim, config.dim, gain=1 / math.sqrt(2 * config.layers))

    def forward(self, x_BTD: Tensor, turn_TK: tuple[Tensor, Tensor]) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.qkv(x_BTD).view(B, T, 3, self.heads, D // self.heads)
        q_BHTK, k_BHTK, v_BHTK = qkv.permute(2, 0, 3, 1, 4)
        y_BHTK = scaled_dot_product_attention(
            rotate(q_BHTK, turn_TK), rotate(k_BHTK, turn_TK), v_BHTK, is_causal=True
        )
        return self.out(y_BHTK.transpose(1, 2).reshape(B, T, D))


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate and up are one matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.dim, 2 * config.hidden)
        self.down = Linear(config.hidden, config.dim, gain=1 / math.sqrt(2 * config.layers))

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config)

    def forward(self, x_BTD: Tensor, turn_TK: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turn_TK)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    cos: Tensor  # [context, K] fp32
    sin: Tensor  # [context, K] fp32

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        self.head = Linear(config.dim, config.vocab)
        if config.tied:
            self.head.weight = self.embed.weight
        cos, sin = rotations(config.context, config.dim // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] in fp32; given targets, the mean loss in nats per token (0-dim)."""
        T = tokens_BT.shape[1]
        x_BTD = self.embed(tokens_BT)
        turn_TK = self.cos[:T].to(x_BTD.dtype), self.sin[:T].to(x_BTD.dtype)
        for block in self.blocks:
            if self.config.checkpoint and self.training:
                x_BTD = checkpoint(block, x_BTD, turn_TK, use_reentrant=False)
            else:
                x_BTD = block(x_BTD, turn_TK)
        logits_BTV = self.head(self.norm(x_BTD)).float()
        if targets_BT is None:
            return logits_BTV
        return cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def rotations(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, both [T, K] in fp32 (RoFormer, section 3.4)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x_BHTK: Tensor, turn_TK: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair ``(x[i], x[i + K/2])`` by its position's angle."""
    cos_TK, sin_TK = turn_TK
    left, right = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat([-right, left], dim=-1) * sin_TK
