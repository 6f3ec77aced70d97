"""A tiny model with experts, its batches, and what one process makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zeroshard.experts.gate import TopKGate
from zeroshard.parallel import MoE

VOCAB, WIDTH, INNER, TOKENS, SAMPLES, STEPS, CLIP, LR = 31, 16, 24, 6, 2, 3, 0.1, 1e-2


@dataclass(frozen=True)
class Setting:
    """``starved``: experts that no token of ``hungry`` data ranks (None: of any) reaches."""

    experts: int = 4
    k: int = 2
    drops: bool = False
    residual: bool = False
    micro: int = 1
    starved: tuple[int, ...] = ()
    hungry: int | None = None
    depth: int = 2
    capacity: float = 1.0
    balance: float = 0.01


class StarvingGate(TopKGate):
    """A gate that keeps tokens away from some experts. ``data_rank``: whose tokens are computed."""

    data_rank = 0
    starved: tuple[int, ...] = ()
    hungry: int | None = None

    def logits(self, x_SM: Tensor) -> Tensor:
        found = super().logits(x_SM)
        if not self.starved or self.hungry not in (None, StarvingGate.data_rank):
            return found
        away = torch.zeros_like(found)
        away[:, list(self.starved)] = -1e4
        return found + away


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


class Block(nn.Module):
    def __init__(self, setting: Setting, ep_size: int, **more: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.moe = MoE(
            WIDTH,
            lambda: make_expert(),
            setting.experts, ep_size, setting.k, drop_tokens=setting.drops, use_rts=False,
            use_residual=setting.residual, top2_2nd_expert_sampling=False, min_capacity=1,
            capacity_factor=setting.capacity, **more,
        )  # fmt: skip
        gate = self.moe.deepspeed_moe.gate
        gate.__class__ = StarvingGate
        gate.starved, gate.hungry = setting.starved, setting.hungry

    def forward(self, x_BTM: Tensor) -> Tensor:
        x_BTM = x_BTM + self.down(torch.tanh(self.up(self.norm(x_BTM))))
        return x_BTM + self.moe(x_BTM)[0]


class Net(nn.Module):
    def __init__(self, setting: Setting, ep_size: int, **more: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(setting, ep_size, **more) for _ in range(setting.depth))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x), sum(block.moe.l_aux for block in self.blocks)


def model(setting: Setting, ep_size: int, dtype: torch.dtype = torch.float64, **more: Any) -> Net:
    """Equal in every process, but for the experts of other ranks."""
    torch.manual_seed(1)
    return Net(setting, ep_size, **more).to(dtype)


def batches(setting: Setting, data: int) -> Tensor:
    """Words, ``[steps, micro-batches, data ranks, samples, tokens]``.

    Those of a rank's micro-batch differ: equal ones have equal probabilities, and then the last bits of
    a product decide which of them keeps a place.
    """
    draw = torch.Generator().manual_seed(7)
    order = torch.rand(STEPS, setting.micro, data, VOCAB, generator=draw).argsort(-1)
    return order[..., : SAMPLES * TOKENS].unflatten(-1, (SAMPLES, TOKENS))


def loss_of(found: tuple[Tensor, Tensor], words: Tensor, balance: float = 0.01) -> Tensor:
    logits, aux = found
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), words.roll(-1, 1).flatten()) + balance * aux


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)


def in_one_process(setting: Setting, data: int) -> Run:
    """AdamW with clipping on the batches of all data ranks, in fp64."""
    net, run = model(setting, 1), Run()
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    for step in batches(setting, data):
        optimizer.zero_grad()
        total = 0.0
        for micro in step:
            for rank, words in enumerate(micro):
                StarvingGate.data_rank = rank
                loss = loss_of(net(words), words, setting.balance) / data / setting.micro
                loss.backward()
                total += loss.item()
        run.norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
        optimizer.step()
        run.losses.append(total)
    run.params = {name: param.detach().clone() for name, param in net.named_parameters()}
    return run
