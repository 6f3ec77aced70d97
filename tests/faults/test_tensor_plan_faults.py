"""A rank that does not come to the cut of a model, or comes with another plan, is named on all ranks."""

from __future__ import annotations

import functools
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from support.tensor_networks import network
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.parallel import plan_checks, tensor_parallel
from zeroshard.session import join
from zeroshard.watchdog.settings import WatchdogSettings

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
CONFIG = {
    "train_micro_batch_size_per_gpu": 6,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "parallel": {"tensor": 2},
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Short intervals for checks, in tenths of a second. Ranks inherit them."""
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")


def opening(what: str) -> tuple[str, str, float]:
    """Class, text and seconds of the error of ``initialize``, of which rank 3 makes another call."""
    zeroshard.init_distributed()
    odd, begun_s = int(os.environ["RANK"]) == 3, time.monotonic()
    if odd and what == "raises":
        raise ValueError("an error of the program")
    plan, config = dict(PLAN), CONFIG
    if odd and what == "plan":
        plan["blocks.*.down"] = "rowwise_split"
    if odd and what == "config":
        config = {**CONFIG, "gradient_clipping": 0.5}
    if odd and what == "mistake":
        config = {**CONFIG, "gradient_cliping": 0.5}
    model = network(32, torch.float32)
    try:
        zeroshard.initialize(
            model=model, config=config, plan=None if odd and what == "none" else plan
        )
    except zeroshard.errors.ZeroShardError as error:
        first = type(error).__name__, str(error), time.monotonic() - begun_s
    else:
        raise AssertionError("nothing failed")
    if what != "raises":  # ranks that go on can use the next call
        engine, *_ = zeroshard.initialize(
            model=network(32, torch.float32), config=CONFIG, plan=PLAN
        )
        engine.close()
    return first


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("raises", "RankLost", ["  rank 3 (", "ended"]),
        ("plan", "RankMismatch", ["First difference: tensor plan = ", "rank 3 has another plan"]),
        ("config", "RankMismatch", ["First difference: gradient_clipping = "]),
        ("mistake", "RankMismatch", ["rank 3 ", "gradient_cliping"]),
        ("none", "RankMismatch", ["rank 3 ", "no parameter of the model is cut"]),
    ],
)
def test_a_rank_that_fails_before_the_cut_is_named_on_all_ranks(what, kind, words):
    died = {3: None} if what == "raises" else {}
    results = run_ranks(opening, 4, what, expect_death=died, group=False, timeout=40)
    for name, text, seconds in results[:3]:
        assert name == kind, text
        for word in words:
            assert word in text
        assert seconds < 15.0
    assert len({text for _, text, _ in results[:3]}) == 1


def cutting(what: str) -> tuple[str, str, float]:
    """Class, text and seconds of the error of ``tensor_parallel`` if the partner does not come."""
    join.WatchdogSettings = functools.partial(
        WatchdogSettings, frozen_s=1.5, collective_timeout_s=1.5
    )
    plan_checks.TIMEOUT_S = 1.5
    zeroshard.init_distributed()
    if int(os.environ["RANK"]) == 1:
        if what == "ended":
            raise ValueError("an error of the program")
        if what == "late":
            time.sleep(5)
        os.kill(os.getpid(), signal.SIGSTOP)
    begun_s = time.monotonic()
    with pytest.raises(zeroshard.errors.ZeroShardError) as caught:
        tensor_parallel(network(32, torch.float32), dist.group.WORLD, PLAN)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - begun_s


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        # It ends before rank 0 begins to wait, or after: another report, of the same rank and call.
        ("ended", "RankLost", ["rank 1", "tensor_parallel"]),
        ("frozen", "RankFrozen", ["  rank 1 (", "rank 0: waiting in tensor_parallel"]),
        (
            "late",
            "RankLate",
            ["  rank 1: ", "rank 0: waiting in tensor_parallel", "rank within 1.5 s."],
        ),
    ],
)
def test_a_rank_whose_tensor_partner_does_not_come_ends(what, kind, words):
    died = {1: None if what == "ended" else signal.SIGSTOP}
    (name, text, seconds), _ = run_ranks(
        cutting, 2, what, expect_death=died, group=False, timeout=40
    )
    assert name == kind, text
    for word in words:
        assert word in text
    assert seconds < 15.0
