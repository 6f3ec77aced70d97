"""A rank that shares experts dies or raises: every other rank, also of another replica, names it.

The ranks with which it exchanges tokens wait in a layer, the others in a reduction or at the step.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from second_step import FAILING, QUICK, fail, outcome_of
from support import expert_models as tiny
from support.expert_models import Setting
from support.expert_runs import opened
from zeroshard_testing import run_ranks

from zeroshard.core.mesh import Mesh

LIMIT_S = 15.0


def outcome(stage: int, replicas: int, where: str, fault: str) -> tuple[str, str, float]:
    """What each rank is told after rank 3 failed in its second step."""

    @contextlib.contextmanager
    def engines() -> Iterator[Any]:
        mesh = Mesh(data_replicate=replicas, data_shard=4 // replicas)
        setting = Setting(depth=1)
        with opened(setting, 2, stage, torch.float32, mesh=mesh, trust=QUICK) as made, made:
            yield made

    return outcome_of(engines, step, lambda made: prepare_fault(made.module, where, fault))


def step(engine: Any) -> None:
    words = tiny.batches(Setting(), 4)[0][0][engine.dp_rank]
    engine.backward(tiny.loss_of(engine(words), words))
    engine.step()


def prepare_fault(net: Any, where: str, fault: str) -> None:
    experts = net.blocks[0].moe.deepspeed_moe.experts.deepspeed_experts
    expert = next(iter(experts.children()))
    if where == "forward":  # tokens have arrived, and results are not sent
        expert.register_forward_hook(lambda *_: fail(fault))
    elif where == "backward":
        next(iter(expert.parameters())).register_hook(lambda _: fail(fault))
    else:  # the tokens of this step are exchanged
        net.embed.weight.register_hook(lambda _: fail(fault))


PLACES = [
    ("forward", 3, 2),
    ("backward", 1, 2),
    ("reduction", 2, 2),
    ("forward", 0, 1),
    ("backward", 3, 1),
]


@pytest.mark.parametrize(("where", "stage", "replicas"), PLACES)
def test_a_killed_rank_is_named_by_all_others(where, stage, replicas):
    died = {FAILING: signal.SIGKILL}
    results = run_ranks(outcome, 4, stage, replicas, where, "kill", expect_death=died, timeout=60)
    for kind, text, seconds in results[:3]:
        assert kind == "RankLost", text
        assert f"  rank {FAILING} (" in text
        assert "ended" in text
        assert seconds < LIMIT_S


@pytest.mark.parametrize(("where", "stage", "replicas"), PLACES)
def test_an_exception_of_one_rank_is_told_to_all_others(where, stage, replicas):
    results = run_ranks(outcome, 4, stage, replicas, where, "raise", timeout=60)
    assert results[FAILING][:2] == ("KeyError", "'a mistake of the program'")
    for kind, text, seconds in results[:3]:
        assert kind == "RankLost", text
        assert f"  rank {FAILING} (" in text
        assert "left: KeyError" in text
        assert seconds < LIMIT_S
