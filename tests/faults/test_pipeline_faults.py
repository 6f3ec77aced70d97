"""A stage of a pipeline that fails: the other stages, which wait for its messages, raise its reason."""

from __future__ import annotations

import os
import signal

import pytest
from support import pipeline_models as models
from torch import Tensor

from zeroshard import Engine
from zeroshard.errors import RankLost, ZeroShardError
from zeroshard.parallel import pipeline
from zeroshard.testing import run_ranks


def failing(_logits: Tensor, _labels: Tensor) -> Tensor:
    raise ValueError("no loss for these labels")


def killing(_logits: Tensor, _labels: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def several(logits: Tensor, _labels: Tensor) -> Tensor:
    return logits


def train(loss_fn: object) -> None:
    model = pipeline(
        models.Decoder(), split=["layers.3"], order=models.ORDER, loss_fn=models.loss_fn
    )
    config = models.config(2, parallel={"pipeline": 2})
    with Engine(model, config=config, optimizer=models.adamw) as engine:
        engine.train_batch(models.data(1, engine.dp_rank))
        model.loss_fn = loss_fn if engine.global_rank else models.loss_fn
        try:
            engine.train_batch(models.data(1, engine.dp_rank))
        except Exception:
            with pytest.raises(ZeroShardError, match="ended in the middle"):
                engine.train_batch(models.data(1, engine.dp_rank))
            raise


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [(failing, "no loss for these labels"), (several, "It must return the mean")],
)
def test_an_error_of_the_last_stage_ends_the_first_one_with_its_reason(loss_fn, text):
    first, last = run_ranks(train, 2, loss_fn, keep_exceptions=True)
    assert text in str(last)
    assert type(first) is RankLost
    assert f"left: {type(last).__name__}: " in str(first)


def test_a_stage_that_is_killed_ends_the_others():
    first, _ = run_ranks(train, 2, killing, keep_exceptions=True, expect_death={1: None})
    assert type(first) is RankLost
    assert "rank 1" in str(first)
