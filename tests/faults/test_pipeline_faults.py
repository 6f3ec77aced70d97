"""A stage of a pipeline that fails: the other stages, which wait for its messages, raise its reason.

A frozen or slow stage is named, with the message that the others wait for.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from support import pipeline_models as models
from support.interpreter_lock import hold
from torch import Tensor, nn
from zeroshard_testing import run_ranks

from zeroshard import Engine
from zeroshard.errors import RankFrozen, RankLate, RankLost, UsageError, ZeroShardError
from zeroshard.parallel import pipeline


def failing(_logits: Tensor, _labels: Tensor) -> Tensor:
    raise ValueError("no loss for these labels")


def killing(_logits: Tensor, _labels: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def several(logits: Tensor, _labels: Tensor) -> Tensor:
    return logits


def train(loss_fn: object, transport: str) -> None:
    model = pipeline(
        models.Decoder(), split=["layers.3"], order=models.ORDER, loss_fn=models.loss_fn
    )
    config = models.config(2, parallel={"pipeline": 2}, transport=transport)
    with Engine(model, config=config, optimizer=models.adamw) as engine:
        engine.train_batch(models.data(1, engine.dp_rank))
        model.loss_fn = loss_fn if engine.global_rank else models.loss_fn
        try:
            engine.train_batch(models.data(1, engine.dp_rank))
        except Exception:
            if engine.global_rank:  # it answers no question now: its reason must be known already
                hold(0.8)
            with pytest.raises(ZeroShardError, match="ended in the middle"):
                engine.train_batch(models.data(1, engine.dp_rank))
            raise


@pytest.mark.parametrize(
    ("loss_fn", "text", "transport"),
    [
        (failing, "no loss for these labels", "shm"),
        (several, "It must return the mean", "stock"),
    ],
)
def test_an_error_of_the_last_stage_ends_the_first_one_with_its_reason(
    loss_fn, text, transport, monkeypatch
):
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")
    first, last = run_ranks(train, 2, loss_fn, transport, keep_exceptions=True)
    assert text in str(last)
    assert type(first) is RankLost
    assert f"left: {type(last).__name__}: " in str(first)


@pytest.mark.parametrize("transport", ["shm", "stock"])
def test_a_stage_that_is_killed_ends_the_others(transport):
    died = {1: None}
    first, _ = run_ranks(train, 2, killing, transport, keep_exceptions=True, expect_death=died)
    assert type(first) is RankLost
    assert "rank 1" in str(first)


QUICK = {"frozen_s": 2.0, "collective_timeout_s": 2.0, "grace_s": 2.0}


class Stopping(nn.Module):
    """A layer that ``what`` happens to in its second step, on a rank that asks for it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.what, self.calls = "", 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.what and self.calls == 3:
            stop(self.what)
        y: Tensor = self.inner(x)
        return y


def stop(what: str) -> None:
    if what == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        time.sleep(30.0)


def train_until_it_stops(what: str, at: int, ranks: int, transport: str) -> tuple[str, float]:
    """The text of the error after rank ``at`` stops in the forward of micro-batch 2, and the seconds."""
    whole, size = models.Decoder(), models.DEPTH // ranks
    whole.layers[at * size] = layer = Stopping(whole.layers[at * size])
    split = [f"layers.{rank * size}" for rank in range(1, ranks)]
    model = pipeline(whole, split=split, order=models.ORDER, loss_fn=models.loss_fn)
    config = models.config(1, parallel={"pipeline": ranks}, trust=QUICK, transport=transport)
    config["units"] = ["Stopping", "Embedding"]
    with Engine(model, config=config, optimizer=models.adamw) as engine:
        layer.what = what if engine.global_rank == at else ""
        begun_s = time.monotonic()
        try:
            engine.train_batch(models.data(1, engine.dp_rank))
        except (RankFrozen, RankLate) as error:
            return f"{type(error).__name__} {error}", time.monotonic() - begun_s
    raise AssertionError("nothing failed")


@pytest.mark.parametrize(
    ("what", "at", "ranks", "kind", "owed", "transport"),
    [
        ("frozen", 1, 2, "RankFrozen", "backward of micro-batch 2, stage 1 to 0", "shm"),
        # Through sockets a message is sent when the other stage begins to receive it.
        ("frozen", 1, 2, "RankFrozen", "forward of micro-batch 3, stage 0 to 1", "stock"),
        ("slow", 2, 3, "RankLate", "stage ", "shm"),
    ],
)
def test_a_stage_that_stops_is_named_with_the_message_that_it_owes(
    what, at, ranks, kind, owed, transport, monkeypatch
):
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")
    died = {at: signal.SIGSTOP if what == "frozen" else None}
    given = (what, at, ranks, transport)
    results = run_ranks(train_until_it_stops, ranks, *given, expect_death=died, timeout=40)
    for text, seconds in results[:at]:  # the last stage stops
        assert kind in text
        assert f"\n  rank {at}" in text
        assert ": waiting in message '" in text
        assert owed in text
        assert seconds < 12.0
    assert len({text for text, _ in results[:at]}) == 1


class WithSpare(nn.Module):
    """A layer with a parameter that is never used."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.spare = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def train_strictly() -> tuple[str, int]:
    whole = models.Decoder()
    whole.layers[4] = WithSpare(whole.layers[4])
    model = pipeline(whole, split=["layers.3"], order=models.ORDER, loss_fn=models.loss_fn)
    keys = {"ignore_unused_parameters": False}
    config = models.config(2, parallel={"pipeline": 2}, zero_optimization=keys)
    with Engine(model, config=config, optimizer=models.adamw) as engine:
        with pytest.raises(UsageError) as caught:
            engine.train_batch(models.data(1, engine.dp_rank))
        return str(caught.value), engine.global_steps


def test_a_parameter_of_one_stage_without_gradient_is_an_error_on_all_stages():
    first, last = run_ranks(train_strictly, 2)
    assert first == last
    assert first[0].startswith(
        "1 trainable parameters got no gradient on any rank: layers.4.spare."
    )
    assert first[1] == 0


class Growing(nn.Module):
    """A layer whose outputs have another length in the second micro-batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        return y if self.calls == 1 else torch.cat([y, y], 1)


def differ(what: str) -> str:
    """The error of ranks that differ in what a step needs."""
    last, whole = int(os.environ["RANK"]) == 1, models.Decoder()
    config = models.config(1, parallel={"pipeline": 2})
    cut = {"split": ["layers.3"], "order": models.ORDER, "loss_fn": models.loss_fn}
    if what == "config" and last:
        config["gradient_accumulation_steps"] = 8
    if what == "schedule" and last:
        cut["schedule"] = "GPipe"
    if what == "split" and last:
        cut["split"] = ["layers.2"]
    if what == "outputs":
        whole.layers[2] = Growing(whole.layers[2])
    with (
        pytest.raises(ZeroShardError) as caught,
        Engine(pipeline(whole, **cut), config=config, optimizer=models.adamw) as engine,
    ):
        if what == "steps" and last:
            engine.accumulation.steps = 2
        engine.train_batch(models.data(1, engine.dp_rank))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("config", "First difference: train_batch_size = 8 (rank 0"),
        ("schedule", "First difference: pipeline schedule = 1F1B, gather micro_batch"),
        ("split", "First difference: first pieces of the pipeline stages = embed, layers.3"),
        ("steps", "rank 1 runs 2 micro-batches per step"),
        ("outputs", "the outputs of micro-batch 1 are"),
    ],
)
def test_stages_that_differ_end_with_one_reason_on_all_ranks(what, text):
    first, last = run_ranks(differ, 2, what)
    assert text in first
    assert text in last
    assert first == last or "left: UsageError" in last
