"""Does a rank ever hold more than its shards and one unit while a model is built?"""

from __future__ import annotations

import pytest
import torch
from census import everything_alive
from peak import Peak
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard import Engine
from zeroshard.core.layout import round_up
from zeroshard.testing import on_ranks
from zeroshard.zero import Init

SLACK = 1.1


class Block(nn.Module):
    """The matrices of a transformer block; none is more than a quarter of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkvo = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.up = nn.Linear(width, 11 * width // 4, bias=False)
        self.gate = nn.Linear(width, 11 * width // 4, bias=False)
        self.down = nn.Linear(11 * width // 4, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.qkvo:
            x = layer(x)
        y: Tensor = self.down(self.up(x) * self.gate(x))
        return y


class Model(nn.Module):
    """Initialised twice, as Hugging Face models are: by the constructors, then over all modules."""

    def __init__(self, width: int, depth: int, vocabulary: int, *, twice: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if twice:
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def config(world: int, **keys: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        **keys,
    }


def allowed(numel: int, unit_numel: int, world: int) -> float:
    """2Ψ/N and one unit, in 16 bit."""
    return SLACK * (2 * numel / world + 2 * unit_numel)


BIG = {"width": 1024, "depth": 6, "vocabulary": 8000}  # 94 million parameters, 187 MB in 16 bit
BIG_NUMEL = 6 * (4 * 1024**2 + 3 * 1024 * 2816 + 1024) + 2 * 8000 * 1024
BIG_UNIT = 4 * 1024**2 + 3 * 1024 * 2816 + 1024


TINY = {"width": 64, "depth": 1, "vocabulary": 64}


def built(how: str, size: dict[str, int]) -> Engine:
    """An engine without optimizer: shards of parameters are all that rests in it."""
    if how == "Init":
        with Init(config_dict_or_path=config(0)):
            model = Model(**size)
    else:
        with torch.device("meta"):
            model = Model(**size, twice=False)
    return Engine(model, config=config(0))


@pytest.mark.parametrize("how", ["Init", "meta device"])
@on_ranks(2, timeout=120)
def test_resident_memory_stays_under_the_shards_and_one_unit(how):
    built(how, TINY).close()  # what is imported and opened once is not counted
    with Peak() as peak, built(how, BIG) as engine:
        numel = sum(p.numel() for p in engine.module.parameters())
        assert (numel, engine.runtime.units[1].layout.params_numel) == (BIG_NUMEL, BIG_UNIT)
    assert peak.nbytes <= allowed(BIG_NUMEL, BIG_UNIT, world=2)
    assert peak.nbytes >= 2 * BIG_NUMEL / 2  # else the measurement is broken


@on_ranks(1)
def test_the_same_measurement_finds_an_ordinary_construction_too_large():
    with Peak() as peak:
        Model(**BIG, twice=False)
    assert peak.nbytes > allowed(BIG_NUMEL, BIG_UNIT, world=2)
