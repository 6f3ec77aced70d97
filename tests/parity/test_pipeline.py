"""Pipelines of two ranks, times two data-parallel ranks, train like plain PyTorch in one process."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from support import pipeline_models as models
from support.covering import each_value
from torch import Tensor
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.parallel import pipeline

STEPS = 4
PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
SPLITS = {1: ["layers.3"], 2: ["layers.1", "layers.3", "layers.5"]}
WHEN = ("micro_batch", "step")
SETTINGS = [
    (schedule, stage, gather, reduce, recompute)
    for schedule, stage, gather, reduce, recompute in itertools.product(
        PER_RANK, (0, 1, 2, 3), WHEN, WHEN, (False, True)
    )
    if (gather == "micro_batch" or stage == 3) and (reduce == "micro_batch" or stage >= 2)
]


def cut(schedule: str, recompute: bool = False, **keys: Any) -> Any:
    split = SPLITS[PER_RANK[schedule]]
    return pipeline(
        models.Decoder(recompute).double(),
        split=split,
        order=models.ORDER,
        loss_fn=models.loss_fn,
        schedule=schedule,
        **keys,
    )


@functools.cache
def expected() -> tuple[dict[str, Tensor], list[float], list[float]]:
    return models.train_plainly(STEPS)


def check(engine: Engine, losses: list[float], norms: list[float]) -> None:
    params, plain_losses, plain_norms = expected()
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    assert norms == pytest.approx(plain_norms, rel=1e-14)
    seen = 0
    for name, value in engine.iter_full_params():
        error = (value - params[name]).abs().max() / params[name].abs().max()
        assert error <= 1e-12, (name, float(error))
        seen += 1
    assert 0 < seen < len(params)


def train(engine: Engine, steps: int) -> tuple[list[float], list[float]]:
    feed, losses, norms = models.data(steps, engine.dp_rank), [], []
    for _ in range(steps):
        losses.append(float(engine.train_batch(feed)))
        norms.append(engine.last_step.grad_norm)
    return losses, norms


@pytest.mark.parametrize(
    ("schedule", "stage", "gather", "reduce", "recompute"), each_value(SETTINGS)
)
@on_ranks(4)
def test_pipelines_train_like_plain_pytorch(schedule, stage, gather, reduce, recompute):
    model = cut(schedule, recompute, gather=gather, reduce=reduce)
    keys = models.config(stage, parallel={"pipeline": 2})
    with Engine(model, config=keys, optimizer=models.adamw) as engine:
        check(engine, *train(engine, STEPS))
