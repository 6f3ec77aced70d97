"""With fake tensors (without memory) the engine holds what the plan says, at any world size."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard import Engine
from zeroshard.core.ledger import RESTING

WORLD, RANK = 64, 17
WIDTH, DEPTH, VOCABULARY, TOKENS = 2048, 20, 32768, 128


class Layer(nn.Module):
    """A transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """1.1 billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(self.norm(x))
        return y


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """A fake process group that only reports a number of ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


def config(stage: int, precision: str = "bf16", accumulation: int = 1) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        precision: {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    }


def take_steps(engine: Engine, steps: int) -> None:
    for _ in range(steps * engine.accumulation.steps):
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        loss = nn.functional.cross_entropy(engine(ids).float().flatten(0, 1), ids.flatten())
        engine.backward(loss)
        engine.step()


def report(engine: Engine) -> tuple[dict[str, int], dict[str, int]]:
    rows = engine.memory_report().rows
    planned = {row.category: row.planned for row in rows if row.planned is not None}
    return planned, {row.category: row.measured for row in rows}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_billion_parameters_on_64_ranks_are_planned_to_the_byte_in_seconds(stage, fake_ranks):
    begun_s = time.monotonic()
    with FakeTensorMode(), Engine(Transformer(), config=config(stage)) as engine:
        numel = sum(p.numel() for p in engine.module.parameters())
        take_steps(engine, 1)
        planned, measured = report(engine)
        fragments = sum(len(shard.fragments) for shard in engine.runtime.optimizer.shards)
    assert time.monotonic() - begun_s < 20
    assert numel > 1_100_000_000
    assert {name: measured[name] for name in RESTING} == planned
    # 2 + 2 + 12 bytes per parameter (ZeRO paper, section 3.1). Only the last norm needs padding, to
    # 64 elements on each rank; this rank's shard of it begins at 17 x 64 and is full.
    padded = numel + 64 * WORLD - WIDTH
    assert planned == {
        "parameters": 2 * padded / (WORLD if stage >= 3 else 1),
        "gradients": 2 * padded / (WORLD if stage >= 2 else 1),
        "master": 4 * padded / (WORLD if stage >= 1 else 1),
        "optimizer": 8 * (padded / WORLD if stage >= 1 else numel) + 4 * fragments,
    }
    if stage == 3:
        layer, embedding = 2 * (12 * WIDTH**2 + 2 * WIDTH), 2 * VOCABULARY * WIDTH
        assert embedding <= measured["gathered"] <= 2 * 64 * WORLD + embedding + layer
        assert 0 < measured["buckets"] <= 2 * embedding + 2 * layer


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_kind_of_step_runs_without_values(stage, precision, accumulation, fake_ranks):
    """Accumulation, loss scaling, clipping, a schedule, several steps, unused parameters."""
    with FakeTensorMode():
        model = nn.Sequential(nn.Embedding(512, 64), Layer(64), Layer(64), nn.Linear(64, 512))
        model.register_parameter("spare", nn.Parameter(torch.zeros(3, 5)))
        with Engine(model, config=config(stage, precision, accumulation)) as engine:
            take_steps(engine, 3)
            planned, measured = report(engine)
            assert engine.global_steps == 3
    spare = planned["optimizer"] - measured.pop("optimizer")  # no gradient, no state
    assert spare in (0, 8 * 15 + 4)
    planned.pop("optimizer")
    assert {name: measured[name] for name in planned} == planned


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_on_disk_are_planned_to_the_byte_and_no_file_is_made(
    stage, accumulation, fake_ranks, tmp_path
):
    settings = config(stage, accumulation=accumulation)
    settings["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme",
        "nvme_path": str(tmp_path / "swap"),
    }
    with FakeTensorMode():
        model = nn.Sequential(nn.Embedding(512, 64), Layer(64), nn.Linear(64, 512))
        with Engine(model, config=settings) as engine:
            take_steps(engine, 2)
            rows = [row for row in engine.memory_report().rows if row.category == "gradients"]
    assert [row for row in rows if row.measured != row.planned] == []
    assert [row.tier for row in rows if row.planned] == (
        ["device", "disk"] if stage == 1 and accumulation > 1 else ["disk"]
    )
    assert not (tmp_path / "swap").exists()


def test_a_given_optimizer_steps_without_values(fake_ranks):
    with FakeTensorMode():
        model = nn.Sequential(nn.Embedding(512, 64), Layer(64), nn.Linear(64, 512))
        settings = config(2)
        del settings["optimizer"], settings["scheduler"]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with Engine(model, config=settings, optimizer=optimizer) as engine:
            take_steps(engine, 2)
            planned, measured = report(engine)
    assert {name: measured[name] for name in RESTING} == planned


def test_the_ranks_of_a_fake_group_are_taken_as_they_are(fake_ranks):
    with FakeTensorMode(), Engine(nn.Linear(64, 64), config=config(3)) as engine:
        assert (engine.global_rank, engine.world_size) == (RANK, WORLD)
        assert engine.transport == "fake"
        assert engine._watch.session_watch is None
        assert engine.train_batch_size() == WORLD
