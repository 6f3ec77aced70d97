"""While a model is built, a rank holds at most its shards and one unit."""

from __future__ import annotations

import itertools

import pytest
import torch
from peak import Peak, SharedPeak, TensorPeak, give_back
from support.covering import each_value
from torch import Tensor, nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import pool

from zeroshard import Engine
from zeroshard.zero import Init, materialize

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
        y = self.norm(x)
        for layer in self.qkvo:
            y = y + layer(y)
        z: Tensor = self.down(self.up(y) * self.gate(y))
        return x + z


class Model(nn.Module):
    """Initialised twice, as Hugging Face models are: by the constructors, then over all modules."""

    def __init__(self, width: int, depth: int, vocabulary: int, *, twice: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
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


def allowed(numel: int, unit_numel: int, world: int) -> float:
    """2Ψ/N and one unit, in 16 bit."""
    return SLACK * (2 * numel / world + 2 * unit_numel)


BIG = {"width": 1024, "depth": 6, "vocabulary": 2048}
BIG_UNIT = 4 * 1024**2 + 3 * 1024 * 2816 + 1024  # a block
BIG_NUMEL = 6 * BIG_UNIT + 2 * 2048 * 1024  # 81 million parameters, 163 MB in 16 bit


TINY = {"width": 64, "depth": 1, "vocabulary": 64}


def built(how: str, size: dict[str, int], **keys: object) -> Engine:
    """An engine without optimizer: it stores only shards of parameters."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "unit_min_numel": 2**16,
        **keys,
    }
    if how == "Init":
        with Init(config_dict_or_path=config):
            model = Model(**size)
    else:
        with torch.device("meta"):
            model = Model(**size, twice=False)
    return Engine(model, config=config)


@pytest.fixture
def fresh_ranks():
    """New processes, in which no memory was freed yet. Freed blocks of earlier tests would be reused,
    and the C library does not return such pages to the system.
    """
    pool().kill()


@pytest.mark.usefixtures("fresh_ranks")
@pytest.mark.parametrize(
    ("how", "transport"), each_value([*itertools.product(("Init", "meta device"), ("p2p", "shm"))])
)
@on_ranks(2, timeout=120)
def test_resident_memory_stays_under_the_shards_and_one_unit(how, transport):
    measure = Peak() if transport == "p2p" else SharedPeak()
    give_back()
    built(how, TINY, transport=transport).close()  # imported and opened once: not counted
    with measure as peak, built(how, BIG, transport=transport) as engine:
        numel = sum(p.numel() for p in engine.module.parameters())
        assert (numel, engine.runtime.units[2].layout.params_numel) == (BIG_NUMEL, BIG_UNIT)
    assert peak.nbytes <= allowed(BIG_NUMEL, BIG_UNIT, world=2)
    assert peak.nbytes >= 2 * BIG_NUMEL / 2  # otherwise the measurement is wrong


@on_ranks(1)
def test_the_same_measurement_finds_an_ordinary_construction_too_large():
    with Peak() as peak:
        Model(**BIG, twice=False)
    assert peak.nbytes > allowed(BIG_NUMEL, BIG_UNIT, world=2)


SMALL = {"width": 128, "depth": 5, "vocabulary": 4096}
SMALL_BLOCK = 4 * 128**2 + 3 * 128 * 352 + 128
SMALL_EMBEDDING = 4096 * 128  # a unit by itself, more than twice a block
SMALL_NUMEL = 5 * SMALL_BLOCK + 2 * SMALL_EMBEDDING


@pytest.mark.parametrize("how", ["Init", "meta device"])
@on_ranks(3)
def test_tensors_stay_under_the_shards_and_the_largest_unit_as_it_is_built(how):
    """Exact, and with a unit of one module. Modules are initialised in fp32: that unit needs 4 bytes."""
    before, materialize.PIECE_NUMEL = materialize.PIECE_NUMEL, 8192
    try:
        with TensorPeak() as peak:
            built(how, SMALL, transport="p2p").close()  # shared memory is measured above
    finally:
        materialize.PIECE_NUMEL = before
    assert peak.nbytes <= SLACK * (2 * SMALL_NUMEL / 3 + 4 * SMALL_EMBEDDING)
    assert peak.nbytes >= 2 * SMALL_NUMEL / 3 + SMALL_BLOCK


@pytest.mark.parametrize("how", ["Init", "meta device"])
@on_ranks(2)
def test_such_an_engine_trains(how):
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with built(how, TINY, **optimizer) as engine:
        before = {name: full.clone() for name, full in engine.iter_full_params()}
        ids = torch.arange(32).view(1, 32)
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()
        assert all((full != before[name]).any() for name, full in engine.iter_full_params())
