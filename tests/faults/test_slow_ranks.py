"""A rank that is slower than the others in every step is named; ranks with uneven data are not."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """The watchdog looks ten times a second. Ranks inherit it."""
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.6")


def busy(seconds: float) -> None:
    until_s = time.thread_time() + seconds  # of this thread alone: the machine may be busy
    while time.thread_time() < until_s:
        pass


def incidents(kind: str) -> list[tuple[int, str]]:
    """What is reported of 100 steps: with one slow rank, or another slow rank in each step."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    engine = zeroshard.Engine(
        net,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "unit_min_numel": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
            "trust": {"stragglers": {"window": 20}},
        },
    )
    found: list[tuple[int, str]] = []
    engine._watch.session_watch.pace.listeners.append(
        lambda incident: found.append((incident[2][0].rank, incident[1]))
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(100):
        if rank == (size - 1 if kind == "slow" else step % size):
            busy(0.03)
        loss = engine(torch.ones(2, 64)).square().mean()
        engine.backward(loss)
        engine.step()
    engine.close()
    return found


def test_a_slow_rank_is_named():
    ((rank, text),) = run_ranks(incidents, 2, "slow", timeout=60)[0]
    assert rank == 1
    assert text.startswith("rank 1 (host ")
    assert "slower than the median over 20 steps: own time " in text


def test_uneven_data_is_not_named():
    assert run_ranks(incidents, 3, "uneven", timeout=60)[0] == []
