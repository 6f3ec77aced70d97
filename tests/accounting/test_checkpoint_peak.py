"""Peak memory of saving and loading stays under its limit, also for very large parameters."""

from __future__ import annotations

import pytest
import torch
from peak import Peak
from torch import Tensor, nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import pool

from zeroshard import Engine
from zeroshard.core.tiers import Tier

MIB = 1 << 20
CEILING_MB = 64
ROWS = 60_000  # x 512: 61 MB in bf16, 369 MB with masters and moments


class Big(nn.Module):
    """A model with one embedding that is nearly all of it."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 512)
        self.head = nn.Linear(512, 8)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(ids))
        return y


def trained(rows: int, stage: int, **checkpoint: object) -> Engine:
    """An engine with all of its state, after one step."""
    with torch.device("meta"):
        model = Big(rows)
    engine = Engine(
        model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage},
            "checkpoint": {"max_buffer_mb": CEILING_MB, **checkpoint},
        },
    )
    engine.backward(engine(torch.zeros(1, 4, dtype=torch.int64)).float().sum())
    engine.step()
    return engine


@pytest.fixture
def fresh_ranks():
    """New processes, in which no memory was freed yet."""
    pool().kill()


@pytest.mark.usefixtures("fresh_ranks")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_save_and_load_need_less_than_the_ceiling(tmp_path, stage):
    with trained(1000, stage) as small:  # imported and run once: not counted
        small.save_checkpoint(tmp_path / "small")
        small.load_checkpoint(tmp_path / "small")
    with trained(ROWS, stage) as engine:
        with Peak() as saving:
            engine.save_checkpoint(tmp_path / "big")
        with Peak() as loading:
            engine.load_checkpoint(tmp_path / "big")
    assert saving.nbytes < CEILING_MB * MIB
    assert loading.nbytes < CEILING_MB * MIB
    assert saving.nbytes > MIB  # otherwise the measurement is wrong


@pytest.mark.usefixtures("fresh_ranks")
@on_ranks(2)
def test_a_copy_costs_this_ranks_bytes_once(tmp_path):
    with trained(1000, 3, asynchronous=True) as small:
        small.save_checkpoint(tmp_path / "small")
    with trained(ROWS, 3, asynchronous=True) as engine:
        shard_nbytes = 12 * sum(unit.layout.shard_numel for unit in engine.runtime.units)
        with Peak() as first:
            engine.save_checkpoint(tmp_path / "first")
            engine.wait_for_checkpoint()
        with Peak() as second:
            engine.save_checkpoint(tmp_path / "second")
            engine.wait_for_checkpoint()
        held = engine.runtime.ledger.nbytes("scratch", Tier.HOST)
        assert shard_nbytes <= held < shard_nbytes + 4 * MIB
    assert shard_nbytes < first.nbytes < shard_nbytes + CEILING_MB * MIB
    assert second.nbytes < CEILING_MB * MIB
