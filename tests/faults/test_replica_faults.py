"""A fault of one rank ends training with replicas on every rank, also on ranks that share no link."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.core.mesh import Mesh

QUICK = {"first_report_s": 1.0, "frozen_s": 2.0, "grace_s": 5.0}
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
    """Class and text of the error after rank 3 failed in its second backward, and the seconds."""
    os.environ["ZEROSHARD_STALL_S"] = "1"
    begun_s = time.monotonic()
    try:
        with engine(stage, transport) as trained:
            step(trained)
            begun_s = time.monotonic()
            if dist.get_rank() == 3:
                trained.module[1].weight.register_hook(lambda _: fail(fault))
            for _ in range(3):
                step(trained)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    finally:
        del os.environ["ZEROSHARD_STALL_S"]
    raise AssertionError("nothing failed")


def fail(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError("a mistake of the program")


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
