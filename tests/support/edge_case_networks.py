"""Larger edge-case models: attention, experts, towers, convolution, recurrence,
complex parameters.

They are added to :data:`support.edge_case_models.CASES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.edge_case_models import (
    BATCH,
    TOKENS,
    VOCAB,
    WIDTH,
    Block,
    Forward,
    at_least_fp32,
    case,
    cross_entropy,
    tokens,
)

HEADS, HEAD_WIDTH, EXPERTS = 2, 6, 4


def _embedding() -> nn.Embedding:
    embedding = nn.Embedding(VOCAB, WIDTH)
    nn.init.normal_(embedding.weight, std=0.2)  # small, since the embedding may also be the head
    return embedding


class Attention(nn.Module):
    """Causal attention with rotary positions, whose frequencies are an fp32 buffer."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        # No biases: a key bias has gradient zero, and Adam would amplify its rounding noise.
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD_WIDTH, bias=False)
        self.proj = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)
        self.register_buffer("inv_freq", 0.1 ** (torch.arange(HEAD_WIDTH // 2) / 3.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        out: Tensor = self.proj(y.transpose(1, 2).flatten(-2))
        return out

    def _rotate(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Layer(nn.Module):
    """RMSNorm, attention, RMSNorm, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up = nn.Linear(WIDTH, 31, bias=False), nn.Linear(WIDTH, 31, bias=False)
        self.down = nn.Linear(31, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        y: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return x + y


@case(tokens, cross_entropy)
class Transformer(nn.Module):
    """A decoder with integer inputs."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = _embedding()
        self.layers: Any = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@case(tokens, cross_entropy)
class Tied(Transformer):
    """Embedding and head are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


@case(tokens, cross_entropy)
class HeadReadsEmbedding(Transformer):
    """A head tied by reading: the root multiplies by ``embed.weight`` without calling ``embed``."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight)


@case(tokens, cross_entropy)
class TiedCheckpointed(Tied):
    """Tied weights around checkpointed layers."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits: Tensor = self.head(self.norm(x))
        return logits


@case(tokens, cross_entropy)
class TorchEncoder(nn.Module):
    """Torch's own layer, which reads the weights of a child that it never calls (``out_proj``)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _embedding()
        self.layers: Any = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, 1, 35, dropout=0.0, batch_first=True, norm_first=True, bias=False
            )
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


@case(tokens, cross_entropy)
class Recurrent(nn.Module):
    """An LSTM keeps a second list of its parameters (``_flat_weights``)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _embedding()
        self.lstm = nn.LSTM(WIDTH, 13, num_layers=2, batch_first=True)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(ids))
        logits: Tensor = self.head(hidden)
        return logits


def routed_tokens(rank: int, _micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Token ids whose remainder is an expert's number. Rank 1 has none for 3; rank 2 none for 0 and 3."""
    reached = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0], [1, 2, 1, 2]][rank % 3])
    numel = BATCH * TOKENS
    expert = reached[torch.arange(numel) % EXPERTS][torch.randperm(numel, generator=generator)]
    ids = expert + EXPERTS * torch.randint(VOCAB // EXPERTS, (numel,), generator=generator)
    return ids.view(BATCH, TOKENS), torch.randint(VOCAB, (BATCH, TOKENS), generator=generator)


class ExpertLayer(nn.Module):
    """A router that needs fp32 weights, and experts that are called only if they have tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Block(WIDTH, 13 + e) for e in range(EXPERTS))

    def forward(self, x: Tensor, expert_of: Tensor) -> Tensor:
        weights = self.router(x.to(self.router.weight.dtype)).softmax(-1)
        weight = weights.gather(1, expert_of[:, None]).to(x.dtype)
        out = x
        for e, expert in enumerate(self.experts):
            chosen = (expert_of == e).nonzero().flatten()
            if chosen.numel() > 0:
                out = out.index_add(0, chosen, expert(x[chosen]) * weight[chosen])
        return out


@case(
    routed_tokens,
    cross_entropy,
    keep_fp32=["*.router.*"],
    conditional_modules=["layers.*.experts.*"],
)
class Experts(nn.Module):
    """A mixture of experts (DeepSpeed #5066). Token ids choose the expert; rounding cannot change it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = _embedding()
        self.layers = nn.ModuleList(ExpertLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, ids.flatten() % EXPERTS)
        logits: Tensor = self.head(x).unflatten(0, ids.shape)
        return logits


def text_with_images(rank: int, micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """``ids`` [B, T], an image [B, 3, 6, 6] on even ranks and None on odd ones, targets [B, T]."""
    ids, targets = tokens(rank, micro, generator)
    images = torch.randn(BATCH, 3, 6, 6, generator=generator)
    return ids, images if rank % 2 == 0 else None, targets


@case(text_with_images, cross_entropy, conditional_modules=["vision"])
class ImageTower(Transformer):
    """A tower that only some ranks run (DeepSpeed #7170)."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = nn.Sequential(
            nn.Conv2d(3, 5, 3), nn.GELU(), nn.Flatten(), nn.Linear(80, WIDTH)
        )

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if images is not None:
            x = x + self.vision(images)[:, None]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def images(_rank: int, _micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Images [B, 3, 6, 6] and values [B, 7]."""
    return (
        torch.randn(BATCH, 3, 6, 6, generator=generator),
        torch.randn(BATCH, 7, generator=generator),
    )


@case(images)
class Convolutions(nn.Module):
    """Convolutions with 4-D weights, and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, 6, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 6), nn.GELU(), nn.Conv2d(6, 6, 3, padding=1, bias=False))
            for _ in range(3)
        )
        self.out = nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        y: Tensor = self.out(x.mean((2, 3)))
        return y


@dataclass
class TowerOutput:
    """An output whose tensors a walk over tuples and dicts does not find."""

    hidden: Tensor
    size: Tensor


class TowerBlock(nn.Module):
    """A block with keyword arguments that returns a dict, a tuple or a dataclass."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.block = Block()
        self.pack = pack

    def forward(self, *, hidden: Tensor) -> Any:
        hidden = self.block(hidden)
        return self.pack(hidden, hidden.square().mean())


class Towers(nn.Module):
    """Two towers of blocks with structured outputs; the model's own output is nested as well."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any], unpack: Callable[[Any], Any]) -> None:
        super().__init__()
        self.left = nn.ModuleList(TowerBlock(pack) for _ in range(2))
        self.right = nn.ModuleList(TowerBlock(pack) for _ in range(2))
        self.unpack = unpack

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        x, size_x = self._run(self.left, x)
        y, size_y = self._run(self.right, y)
        return {"difference": x - y, "sizes": (size_x, [size_y]), "name": "towers", "none": None}

    def _run(self, tower: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor]:
        sizes = []
        for block in tower:
            x, size = self.unpack(block(hidden=x))
            sizes.append(size)
        return x, torch.stack(sizes).sum()


def tower_features(_rank: int, _micro: int, generator: torch.Generator) -> tuple[Any, ...]:
    """``x`` and ``y``, both [B, D]: one for each tower."""
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator)
    return x, y


def tower_loss(forward: Forward, batch: tuple[Any, ...]) -> Tensor:
    """A loss that uses every part of the nested output."""
    out = forward(*batch)
    size_x, (size_y,) = out["sizes"]
    difference = at_least_fp32(out["difference"]).square().mean()
    return difference + 0.1 * at_least_fp32(size_x) + 0.2 * at_least_fp32(size_y)


@case(tower_features, tower_loss)
def dict_outputs() -> nn.Module:
    """Blocks return dicts."""
    return Towers(
        lambda hidden, size: {"hidden": hidden, "size": size},
        lambda out: (out["hidden"], out["size"]),
    )


@case(tower_features, tower_loss)
def tuple_outputs() -> nn.Module:
    """Blocks return tuples."""
    return Towers(lambda hidden, size: (hidden, size), lambda out: out)


@case(tower_features, tower_loss)
def dataclass_outputs() -> nn.Module:
    """Blocks return dataclasses."""
    return Towers(TowerOutput, lambda out: (out.hidden, out.size))


class StateSpace(nn.Module):
    """A diagonal state-space layer (S4D): states and their read-out are complex. [B, C, L] to itself."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        decay, frequency = torch.full((channels, states), -0.5), torch.arange(states) * math.pi
        self.log_step = nn.Parameter(torch.linspace(-3.0, -1.0, channels))
        self.poles = nn.Parameter(torch.complex(decay, frequency.expand(channels, states)))
        self.read_out = nn.Parameter(torch.randn(channels, states, dtype=torch.complex64))

    def forward(self, u_BCL: Tensor) -> Tensor:
        length, real = u_BCL.shape[-1], self.poles.dtype.to_real()
        step_CS = self.poles * self.log_step.to(real).exp().unsqueeze(-1)
        powers_CSL = torch.exp(step_CS.unsqueeze(-1) * torch.arange(length))
        gain_CS = self.read_out * (step_CS.exp() - 1) / self.poles
        kernel_CL = 2 * torch.einsum("cs,csl->cl", gain_CS, powers_CSL).real
        u_F = torch.fft.rfft(u_BCL.to(real), n=2 * length)
        y_BCL = torch.fft.irfft(u_F * torch.fft.rfft(kernel_CL, n=2 * length), n=2 * length)
        return y_BCL[..., :length].to(u_BCL.dtype)


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: a complex matrix for each low frequency. [B, C, L]."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        weight = torch.randn(channels, channels, modes, dtype=torch.complex64)
        self.weight = nn.Parameter(weight / channels)
        self.skip = nn.Conv1d(channels, channels, 1)

    def forward(self, x_BCL: Tensor) -> Tensor:
        x_BCF = torch.fft.rfft(x_BCL.to(self.weight.dtype.to_real()))
        low_BCM = torch.einsum("bim,iom->bom", x_BCF[..., : self.modes], self.weight)
        y_BCL = torch.fft.irfft(low_BCM, n=x_BCL.shape[-1]).to(x_BCL.dtype)
        return F.gelu(y_BCL + self.skip(x_BCL))


@case()
class Complex(nn.Module):
    """Complex parameters beside real ones, as in S4D and in Fourier neural operators; one is frozen."""

    def __init__(self, channels: int = 3) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.blocks = nn.ModuleList(
            [StateSpace(channels, 5), Spectral(channels, 7), StateSpace(channels, 1)]
        )
        self.blocks[2].poles.requires_grad_(False)
        self.project = nn.Conv1d(channels, 1, 1)

    def forward(self, x_BD: Tensor) -> Tensor:
        x_BCD = self.lift(x_BD.unsqueeze(1))
        for block in self.blocks:
            x_BCD = x_BCD + block(x_BCD)
        y_B1D: Tensor = self.project(x_BCD)
        return y_B1D.squeeze(1)
