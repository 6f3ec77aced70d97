"""A fault of one rank ends training with an error on every rank, at every stage."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist
from kit import outcome
from support.covering import covering, sampled
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard

STAGES = (0, 1, 2, 3)
TRANSPORTS = ("shm", "p2p", "stock")
FAULTS = {"raises": 1, "killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "ends": None}
"""What happens to rank 1, and how its process ends."""
SAID = {"raises": "ZeroDivisionError: bad sample", "killed": "ended", "frozen": "is stopped by a signal",
        "ends": "closed its engine"}  # fmt: skip
CALLS = {0: "reduce '", 3: "gather 'blocks.0'"}
"""By stage: what the survivor waits in, after rank 1 has done one step."""
TABLE = [(fault, stage, each) for fault in FAULTS for stage in STAGES for each in TRANSPORTS]
QUICK = {"first_report_s": 1.0, "frozen_s": 2.0, "grace_s": 5.0}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Runs its blocks in a given order."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        for i in order:
            x = self.blocks[i](x)
        return x


def config(stage: int, **more) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "unit_min_numel": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "trust": QUICK,
        **more,
    }


def step(engine, order=(0, 1, 2, 3)) -> None:
    loss = engine(torch.ones(2, 16), order).square().mean()
    engine.backward(loss)
    engine.step()


def diverging(
    stage: int, order: tuple[int, ...], transport: str = "auto"
) -> tuple[str, str, float]:
    def body() -> None:
        with zeroshard.Engine(Net(), config=config(stage, transport=transport)) as engine:
            step(engine)
            step(engine, order if dist.get_rank() == 1 else (0, 1, 2, 3))
            step(engine)

    return outcome(body)


class Starved(Block):
    """Gets no memory when it is asked to."""

    starves = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.starves:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
        return super().forward(x)


def going_on(stage: int) -> tuple[str, str, float]:
    """Rank 1 catches an error of memory that it alone has, and goes on."""

    def body() -> None:
        net = Net()
        net.blocks[2] = starved = Starved()
        with zeroshard.Engine(net, config=config(stage)) as engine:
            step(engine)
            starved.starves = dist.get_rank() == 1
            try:
                step(engine)
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
            starved.starves = False
            step(engine)

    return outcome(body)


def test_a_rank_that_goes_on_after_its_own_error_of_memory_is_named_with_it():
    for kind, text, seconds in run_ranks(going_on, 2, 3, timeout=40):
        assert kind == "RankDivergence"
        assert "Rank 1 went on after OutOfMemoryError (an allocation failed) in forward." in text
        assert "out of memory" not in text.lower()  # programs that look for a batch size catch that
        assert seconds < 30


SKIPS, SWAPS = (0, 1, 3), (0, 2, 1, 3)


@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
@pytest.mark.parametrize("order", [SKIPS, SWAPS], ids=["skips", "swaps"])
def test_stage_3_ranks_that_run_other_units_are_named(order, transport):
    for kind, text, seconds in run_ranks(diverging, 2, 3, order, transport, timeout=40):
        assert kind == "RankDivergence"
        assert "blocks.1" in text
        assert "rank 0" in text
        assert "rank 1" in text
        assert len(text.splitlines()) <= 5
        assert seconds < 20


def dropping_layers(patterns: list[str], step_of_drop: int) -> tuple[str, str, float]:
    """Each rank drops a different layer, as LayerDrop does."""
    dropped = [(0, 2, 3), (0, 1, 3)][dist.get_rank()]

    def body() -> None:
        keys = config(3, conditional_modules=patterns)
        with zeroshard.Engine(Net(), config=keys) as engine:
            for i in range(3):
                step(engine, dropped if i == step_of_drop else (0, 1, 2, 3))

    return outcome(body)


@pytest.mark.parametrize("step_of_drop", [0, 1])
def test_layers_dropped_by_chance_run_with_the_patterns_that_the_verdict_names(step_of_drop):
    results = run_ranks(dropping_layers, 2, [], step_of_drop, timeout=40)
    for kind, text, _ in results:
        assert kind == "RankDivergence"
        assert len(text.splitlines()) <= 5
        patterns = json.loads(re.search(r'"conditional_modules": (\[.*?\])', text)[1])
        assert patterns == ["blocks.*"]
    for kind, text, _ in run_ranks(dropping_layers, 2, patterns, step_of_drop, timeout=40):
        assert (kind, text) == ("", "")


def off_from_plain(stage: int, order: tuple[int, ...], transport: str) -> float:
    """How far parameters are from plain SGD on the mean gradient of both orders, after a step."""
    torch.manual_seed(0)
    model = Net().double()
    plain = copy.deepcopy(model)
    for each in ((0, 1, 2, 3), order):
        (plain(torch.ones(2, 16).double(), each).square().mean() / 2).backward()
    keys = config(stage, transport=transport, gradient_clipping=0.0)
    with zeroshard.Engine(model, config=keys) as engine:
        loss = engine(torch.ones(2, 16).double(), order if dist.get_rank() else (0, 1, 2, 3))
        engine.backward(loss.square().mean())
        engine.step()
        return max(
            float((ours - (theirs - 0.1 * theirs.grad)).abs().max())
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True)
        )


@pytest.mark.parametrize("transport", ["shm", "p2p", "stock"])
@pytest.mark.parametrize("order", [SKIPS, SWAPS], ids=["skips", "swaps"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_a_rank_may_run_other_units(stage, order, transport):
    # Whole parameters need no gather, and a missing gradient counts as zero: nothing diverges.
    assert max(run_ranks(off_from_plain, 2, stage, order, transport, timeout=40)) < 1e-12


def alone(what: str, folder: str) -> tuple[str, str, float]:
    """Only rank 0 does what every rank must do."""

    def body() -> None:
        with zeroshard.Engine(Net(), config=config(3)) as engine:
            step(engine)
            if dist.get_rank() == 0 and what == "reads":
                print(engine.module.blocks[2].linear.weight.sum())
            elif what == "loads":
                engine.save_checkpoint(folder)
                if dist.get_rank() == 0:
                    engine.load_checkpoint(folder)
            elif dist.get_rank() == 0:
                engine.save_checkpoint(folder)
            step(engine)

    return outcome(body)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("reads", "Rank 0 read values of 'blocks.2' alone"),
        ("saves", "Neither can continue: rank 1 did not make that call."),
        ("loads", "Neither can continue: rank 1 did not make that call."),
    ],
)
def test_what_rank_0_does_alone_is_named_in_seconds(what, words, tmp_path):
    for kind, text, seconds in run_ranks(alone, 2, what, str(tmp_path), timeout=40):
        assert kind in (
            "RankDivergence",
            "RankLost",
        )  # lost: the rank that detected the cause reported it
        assert words in text
        assert "test_engine_faults.py" in text
        assert seconds < 20


def with_other_config(stage: int) -> tuple[str, str, float]:
    other = {"gradient_clipping": 0.5} if dist.get_rank() == 1 else {"gradient_clipping": 0.25}
    return outcome(lambda: zeroshard.Engine(Net(), config=config(stage, **other)))


@pytest.mark.parametrize("stage", STAGES)
def test_another_config_on_one_rank_is_an_error_before_the_first_byte(stage):
    results = run_ranks(with_other_config, 2, stage, timeout=40)
    for kind, text, seconds in results:
        assert kind == "RankMismatch"
        assert "gradient_clipping" in text
        assert "0.5" in text
        assert "0.25" in text
        assert seconds < 5
    assert results[0][1] == results[1][1]


def with_broken_config(stage: int) -> tuple[str, str, float]:
    extra = {"gradient_cliping": 0.5} if dist.get_rank() == 1 else {}
    return outcome(lambda: zeroshard.Engine(Net(), config=config(stage, **extra)))


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_in_set_up_is_named_to_the_others(stage):
    (kind_0, text_0, seconds), (kind_1, _, _) = run_ranks(with_broken_config, 2, stage, timeout=40)
    assert kind_1 == "ConfigError"
    assert kind_0 == "RankMismatch"
    assert "rank 1" in text_0
    assert "gradient_cliping" in text_0
    assert seconds < 5


def with_fault(fault: str, stage: int, transport: str) -> tuple[str, str, float]:
    engine = zeroshard.Engine(Net(), config=config(stage, transport=transport))
    step(engine)

    def body() -> None:
        with engine:
            if dist.get_rank() == 1:
                if fault == "raises":
                    raise ZeroDivisionError("bad sample")
                if fault == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "frozen":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "ends":
                    return
            for _ in range(3):
                step(engine)

    return outcome(body)


@pytest.mark.parametrize(("fault", "stage", "transport"), covering(TABLE))
def test_a_rank_that_fails_is_named_with_the_call_that_waits_for_it(fault, stage, transport):
    """A stopped rank within ``frozen_s`` and 5 s more. ``ZEROSHARD_TEST_ALL=1`` runs the whole table."""
    died = {} if FAULTS[fault] is None else {1: FAULTS[fault]}
    results = run_ranks(with_fault, 2, fault, stage, transport, expect_death=died, timeout=40)
    kind, text, seconds = results[0]
    assert kind == ("RankFrozen" if fault == "frozen" else "RankLost"), text
    lines = text.splitlines()
    assert len(lines) <= 5
    blamed = [line for line in lines if line.startswith("  rank 1")]
    assert blamed and SAID[fault] in blamed[0], text
    assert CALLS.get(stage, "'") in text, text
    assert seconds < QUICK["frozen_s"] + 5
    if fault == "ends":
        assert results[1][0] == ""


def soaked(stage: int, transport: str) -> int:
    """500 steps in which each rank pauses now and then, some longer than the first report takes."""
    pauses = random.Random(dist.get_rank())
    keys = {"first_report_s": 0.1, "frozen_s": 5.0, "check_every": 4}
    with zeroshard.Engine(Net(), config=config(stage, transport=transport, trust=keys)) as engine:
        with contextlib.redirect_stderr(io.StringIO()):
            for number in range(500):
                if pauses.random() < 0.02:
                    time.sleep(pauses.choice((0.01, 0.05, 0.2)))
                step(engine)
                assert engine.global_steps == number + 1
        return engine.global_steps


@pytest.mark.parametrize(("stage", "transport"), sampled([(3, "shm"), (0, "stock")], every=2))
def test_uneven_ranks_raise_nothing_in_500_steps(stage, transport):
    assert run_ranks(soaked, 2, stage, transport, timeout=100) == [500, 500]
