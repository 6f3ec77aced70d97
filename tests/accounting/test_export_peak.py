"""An export needs memory for a few pieces, independently of the size of tensors."""

from __future__ import annotations

import pytest
import torch
from checkpoint_dirs import write_checkpoint
from peak import Peak, give_back
from support.covering import sampled
from torch import Tensor, nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import pool

from zeroshard import Engine
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import export_checkpoint
from zeroshard.engine import export

SLACK_NBYTES = (
    160 << 20
)  # pieces as read and as converted, what the library maps, blocks on threads


@pytest.fixture
def fresh_ranks():
    """New processes, in which no memory was freed yet."""
    pool().kill()


@pytest.mark.usefixtures("fresh_ranks")
@pytest.mark.parametrize("dtype", sampled(["bfloat16", None], every=2))
@on_ranks(1)
def test_a_checkpoint_is_exported_in_pieces(dtype, tmp_path):
    embedding = torch.ones(60_000, 1024)
    for name, values in (("big", embedding), ("small", torch.ones(5))):
        write_checkpoint(tmp_path / name, {"embedding": values}, block_nbytes=4 << 20)
    del embedding, values
    with CheckpointReader(
        tmp_path / "small" / "global_step10"
    ) as saved:  # imported and run once: not counted
        export_checkpoint(saved, tmp_path / "warm", dtype=dtype)
    with CheckpointReader(tmp_path / "big" / "global_step10") as saved, Peak() as peak:
        export_checkpoint(saved, tmp_path / "out", dtype=dtype)
    assert peak.nbytes < SLACK_NBYTES < 240_000_000
    assert peak.nbytes > 1 << 20  # otherwise the measurement is wrong


class Big(nn.Module):
    """Two large units. Together they have twice the size that may be in memory."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, 1024)
        self.head = nn.Linear(1024, rows, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.embedding(ids))
        return y


def built(rows: int) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "unit_min_numel": 2**10,
        "transport": "p2p",
    }
    with torch.device("meta"):
        model = Big(rows)
    return Engine(model, config=config)


@pytest.mark.usefixtures("fresh_ranks")
@on_ranks(2)
def test_an_engine_is_exported_unit_by_unit(tmp_path):
    give_back()
    with built(16) as engine:
        export.save_pretrained(engine, tmp_path / "warm")
    with built(100_000) as engine:
        unit_nbytes = max(unit.full_nbytes for unit in engine.runtime.units)
        assert unit_nbytes == 2 * 100_000 * 1024
        with Peak() as peak:
            export.save_pretrained(engine, tmp_path / "out")
        assert peak.nbytes < unit_nbytes + SLACK_NBYTES < 2 * unit_nbytes
        assert peak.nbytes > 0.9 * unit_nbytes  # otherwise the measurement is wrong
