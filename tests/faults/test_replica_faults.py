"""A fault of one rank ends training with replicas on every rank, also on ranks that share no link."""

from __future__ import annotations

import signal

import pytest
import torch
from second_step import QUICK, fail, outcome_of
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.core.mesh import Mesh

LIMIT_S = 15.0


def engine(stage: int, transport: str) -> zeroshard.Engine:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    keys = {
        "train_micro_batch_size_per_gpu": 2,
        "unit_min_numel": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "transport": transport,
        "trust": QUICK,
    }
    return zeroshard.Engine(model, config=keys, mesh=Mesh(data_replicate=2, data_shard=2))


def step(trained) -> None:
    trained.backward(trained(torch.ones(2, 16)).square().mean())
    trained.step()


def outcome(stage: int, transport: str, fault: str) -> tuple[str, str, float]:
    """What each rank is told after rank 3 failed in its second backward."""

    def prepare(trained: zeroshard.Engine) -> None:
        trained.module[1].weight.register_hook(lambda _: fail(fault))

    return outcome_of(lambda: engine(stage, transport), step, prepare)


@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_killed_rank_is_named_by_all_others(stage, transport):
    died = {3: signal.SIGKILL}
    results = run_ranks(outcome, 4, stage, transport, "kill", expect_death=died, timeout=60)
    for kind, text, seconds in results[:3]:
        assert kind == "RankLost", text
        assert "  rank 3 (" in text
        assert "ended" in text
        assert seconds < LIMIT_S


@pytest.mark.parametrize("transport", ["shm", "p2p"])
def test_an_exception_of_one_rank_is_told_to_all_others(transport):
    results = run_ranks(outcome, 4, 2, transport, "raise", timeout=60)
    assert results[3][:2] == ("KeyError", "'a mistake of the program'")
    for kind, text, seconds in results[:3]:
        assert kind == "RankLost", text
        assert "left: KeyError" in text
        assert seconds < LIMIT_S
