"""Ranks that share the experts of layers train as one process does, at every stage and mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import expert_models as tiny
from support.covering import each_value
from support.expert_models import Run, Setting
from support.expert_runs import opened, trained
from zeroshard_testing import on_ranks

STAGES = (0, 1, 2, 3)


def assert_equal(found: Run, expected: Run, tolerance: float = 1e-12) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert min(found.norms) > tiny.CLIP  # clipping is active
    assert found.params.keys() <= expected.params.keys()
    assert sum("experts" in name for name in found.params)
    for name, param in found.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=tolerance)


def check(setting: Setting, ep_size: int, stage: int, **keys: Any) -> None:
    with opened(setting, ep_size, stage, **keys) as engine:
        found, size = trained(engine, setting), engine.dp_size
    assert_equal(found, tiny.in_one_process(setting, size))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_ranks_that_share_experts_equal_one_process(stage):
    check(Setting(), 2, stage)


@pytest.mark.parametrize(
    ("setting", "ep_size", "stage"),
    each_value(
        [
            (setting, ep_size, stage)
            for setting in (
                Setting(micro=2, residual=True),
                Setting(k=1, starved=(3,), hungry=1),
                Setting(k=1, starved=(2, 3)),
                Setting(drops=True, capacity=0.6),
                Setting(k=3, drops=True, capacity=0.6),
            )
            for ep_size in (2, 4)
            for stage in (3, 0, 1, 2)
        ]
    ),
)
@on_ranks(4)
def test_four_ranks_equal_one_process(setting, ep_size, stage):
    check(setting, ep_size, stage)
