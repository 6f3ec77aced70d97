"""A rank that does not take part in an operation is named on all ranks, whatever the others are doing.

Rank 0 does something that all ranks must do. Rank 1 joins only after rank 0 has given up. Both errors
must say which rank was missing, where each rank is, in which line, and what to do.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.session.session import open_session
from zeroshard.watchdog.settings import WatchdogSettings

LIMIT_S = 1.0
TRUST = {
    "collective_timeout_s": LIMIT_S,
    "sections": dict.fromkeys(("setup", "save", "load", "export"), LIMIT_S),
}

Outcome = tuple[str, str, float]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Net(nn.Module):
    def __init__(self, pause: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        pause()
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = self(x)
        return x


def config(stage: int = 3, **zero) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "unit_min_numel": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "trust": TRUST,
    }


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Short intervals for checks and first reports, in tenths of a second. Ranks inherit them."""
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")


@pytest.fixture
def gate(tmp_path) -> str:
    """A pipe. A read waits until another rank has written."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return str(path)


def failure(body: Callable[[], object]) -> Outcome:
    """Class and text of the error that ends ``body``, and the seconds it took."""
    begun_s = time.monotonic()
    try:
        body()
    except zeroshard.errors.DistributedError as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    return "", "nothing failed", 0.0


def outcome(body: Callable[[], object], gate: str, first: int = 0) -> Outcome:
    """Like :func:`failure`. Rank ``first`` opens the gate when its call has ended. Then the others
    call."""
    ahead = int(os.environ["RANK"]) == first
    try:
        if not ahead:
            Path(gate).read_bytes()
        return failure(body)
    finally:
        if ahead:
            Path(gate).write_bytes(b"open")


def check(results: list[Outcome], *words: str, kind: str = "RankLate", missing: int = 1) -> None:
    for name, text, seconds in results:
        assert name == kind, text
        for word in words:
            assert word in text
        assert f"rank {missing}: " in text
        assert "Fix: " in text
        assert len(text.splitlines()) <= 5
        assert max(map(len, text.splitlines())) <= 200
        assert seconds < LIMIT_S + 4  # on a busy machine most of it is delay
    assert len({text for _, text, _ in results}) == 1


# -- with an engine --------------------------------------------------------------------------------


def step(engine) -> None:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()


def backward(engine) -> Callable[[], object]:
    loss = engine(torch.ones(2, 8)).square().mean()
    return lambda: engine.backward(loss)


def plain_backward(engine) -> Callable[[], object]:
    loss = engine(torch.ones(2, 8)).square().mean()
    return lambda: loss.backward()


def update(engine) -> Callable[[], object]:
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    return lambda: engine.step()


def gathered(engine) -> None:
    with zeroshard.zero.GatheredParameters(list(engine.module.parameters())):
        pass


def read_master(engine) -> torch.Tensor:
    return zeroshard.zero.safe_get_full_fp32_param(engine.module.blocks[1].linear.weight)


def loads(engine, folder: str) -> Callable[[], object]:
    engine.save_checkpoint(folder)
    return lambda: engine.load_checkpoint(folder)


#: What is prepared on all ranks, giving the call that rank 1 does not come to; words of the verdict.
CALLS = {
    "forward": (lambda e, _: lambda: e(torch.ones(2, 8)), ("gather 'blocks.", "in forward")),
    "backward": (lambda e, _: backward(e), ("'blocks.", "in backward")),
    "plain backward": (lambda e, _: plain_backward(e), ("'blocks.", "in backward")),
    "step": (lambda e, _: update(e), ("exchange 'norm'", "in step")),
    "gathered": (lambda e, _: lambda: gathered(e), ("gather '", "in access")),
    "safe_get": (lambda e, _: lambda: read_master(e), ("'blocks.1", "in access")),
    "read": (
        lambda e, _: lambda: e.module.blocks[1].linear.weight.sum(),
        ("gather 'blocks.1, read'", "in access"),
    ),
    "generate": (
        lambda e, _: lambda: e.module.generate(torch.ones(2, 8)),
        ("gather 'blocks.", "in generate"),
    ),
    "save": (lambda e, to: lambda: e.save_checkpoint(to), ("exchange 'planning it'", "in save")),
    "load": (loads, ("exchange '", "in load")),
    "16bit": (
        lambda e, to: lambda: e.save_16bit_model(to),
        ("exchange 'rank 0 writes weights'", "in export"),
    ),
    "safetensors": (
        lambda e, to: lambda: e.save_16bit_model(to, "model.safetensors"),
        ("exchange 'rank 0 writes weights'", "in export"),
    ),
}


def alone(call: str, folder: str, gate: str) -> Outcome:
    engine = zeroshard.Engine(Net(), config=config())
    step(engine)
    found = outcome(CALLS[call][0](engine, folder), gate)
    engine.close(found[0])
    return found


@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_does_not_come_to_a_call_of_the_engine_is_named(call, gate, tmp_path):
    results = run_ranks(alone, 2, call, str(tmp_path / "to"), gate, timeout=40)
    check(results, *CALLS[call][1], "rank 0: waiting in", "test_stalls.py:", "outside collectives")


def while_the_other_trains(call: str, folder: str) -> Outcome:
    engine = zeroshard.Engine(Net(), config=config())
    step(engine)
    act = CALLS[call][0](engine, folder)
    found = failure(act if dist.get_rank() == 0 else lambda: step(engine))
    engine.close(found[0])
    return found


@pytest.mark.parametrize("call", ["save", "load", "safetensors"])
def test_a_meeting_on_one_rank_and_a_collective_on_the_other_end_in_words(call, tmp_path):
    results = run_ranks(while_the_other_trains, 2, call, str(tmp_path / "to"), timeout=40)
    for kind, text, _ in results:
        assert kind == "RankDivergence", text
        assert f"  rank 0: waiting in {CALLS[call][1][0]}" in text
        assert CALLS[call][1][1] in text
        assert "  rank 1: waiting in gather 'blocks." in text
        assert "Neither can continue: rank 1 did not make that call." in text
        assert "Fix: " in text


def closes(gate: str) -> Outcome:
    """``close`` publishes the parameters of a delayed update. All ranks must take part."""
    offload = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    engine = zeroshard.Engine(Net(), config=config(2, **offload))
    step(engine)
    return outcome(engine.close, gate)


def test_a_rank_that_does_not_close_is_named_where_closing_needs_it(gate):
    results = run_ranks(closes, 2, gate, timeout=40)
    check(results, "gather '", "in close")


# -- before there is one ---------------------------------------------------------------------------


def initialize() -> None:
    zeroshard.Engine(Net(), config=config()).close()


def construct() -> None:
    with zeroshard.zero.Init(config_dict_or_path=config()):
        Net()


SET_UPS = {"initialize": initialize, "zero.Init": construct}


def sets_up(what: str, joins: bool, gate: str) -> Outcome:
    if joins:
        zeroshard.init_distributed(dist_backend="gloo", verbose=False)
    return outcome(SET_UPS[what], gate)


@pytest.mark.parametrize("what", SET_UPS)
def test_a_rank_that_does_not_come_to_a_set_up_is_named_with_its_line(what, gate):
    """It joined the others through ZeroShard, which has watched it since."""
    results = run_ranks(sets_up, 2, what, True, gate, group=False, timeout=40)
    check(results, f"rank 0: waiting in {what} (", "rank 1: outside collectives, pathlib.py:")
    assert "test_stalls.py:" in results[0][1].splitlines()[2]


@pytest.mark.parametrize("what", SET_UPS)
def test_a_rank_that_has_not_met_zeroshard_yet_is_named_as_such(what, gate):
    results = run_ranks(sets_up, 2, what, False, gate, timeout=40)
    check(results, f"rank 0: waiting in {what} (", "rank 1: has not reached ZeroShard yet")


def joins(late: int, gate: str) -> Outcome:
    limit = timedelta(seconds=LIMIT_S)
    return outcome(
        lambda: zeroshard.init_distributed(dist_backend="gloo", verbose=False, timeout=limit),
        gate,
        first=1 - late,
    )


def test_a_rank_that_does_not_join_the_others_is_named(gate):
    results = run_ranks(joins, 2, 1, gate, group=False, timeout=40)
    check(results, "waiting in init_distributed (test_stalls.py:", "rank 1: has not reached init_")


def test_a_rank_that_does_not_serve_the_store_is_named(gate):
    """Without rank 0 the other ranks cannot exchange messages."""
    first, waited = run_ranks(joins, 2, 0, gate, group=False, timeout=40)
    check([waited], "waiting in the store at 127.0.0.1:", "rank 0: has not reached", missing=0)
    check([first], "rank 1: has not reached")  # it gave up


def constructs_halfway(gate: str) -> Outcome:
    """Rank 0, whose values all ranks get, stops between two layers of the model's constructor."""
    rank = dist.get_rank()

    def body() -> None:
        with zeroshard.zero.Init(config_dict_or_path=config()):
            Net(lambda: None if rank else Path(gate).read_bytes())

    found = failure(body)
    if rank:
        Path(gate).write_bytes(b"open")
    return found


def test_a_rank_that_stops_in_a_constructor_is_named_with_its_line(gate):
    results = run_ranks(constructs_halfway, 2, gate, timeout=40)
    waits = "rank 1: waiting in exchange 'parameters under construction'"
    check(
        results, waits, "in zero.Init", "rank 0: outside collectives", "test_stalls.py:", missing=0
    )


def gathers_before_an_engine(gate: str) -> Outcome:
    with zeroshard.zero.Init(config_dict_or_path=config()):
        model = Net()

    def gather() -> None:
        with zeroshard.zero.GatheredParameters([model.head.weight]):
            pass

    return outcome(gather, gate)


def test_a_rank_that_does_not_come_to_an_access_before_an_engine_is_named(gate):
    results = run_ranks(gathers_before_an_engine, 2, gate, timeout=40)
    check(results, "gather 'Linear.weight and 7 more'", "in access")


def differs() -> Outcome:
    return failure(initialize if dist.get_rank() else construct)


def test_ranks_in_set_ups_of_different_things_are_told_so_at_once():
    for kind, text, _ in run_ranks(differs, 2, timeout=40):
        assert kind == "RankMismatch"
        assert "call = zero.Init (rank 0" in text
        assert "initialize (rank 1" in text


# -- ranks that end, and calls of the program's own ------------------------------------------------


def ends_early() -> Outcome:
    zeroshard.init_distributed(dist_backend="gloo", verbose=False)
    if dist.get_rank():
        os._exit(0)
    return failure(initialize)


def test_a_rank_that_ended_before_the_set_up_is_named():
    results = run_ranks(ends_early, 2, group=False, expect_death={1: 0}, timeout=40)
    kind, text, seconds = results[0]
    assert kind == "RankLost"
    assert "  rank 1 (" in text
    assert "ended" in text
    assert "waiting in initialize (test_stalls.py:" in text
    assert seconds < LIMIT_S + 4


def waits_by_itself(stays: bool) -> Outcome:
    """Rank 0 is in a barrier of the program. ZeroShard cannot interrupt it there."""
    trust = WatchdogSettings(collective_timeout_s=LIMIT_S, stuck_s=LIMIT_S, grace_s=0.2)
    watch = open_session(transport="auto", device=torch.device("cpu"), trust=trust, plan={"a": "1"})
    if dist.get_rank() == 0:
        dist.barrier()
    elif stays:
        threading.Event().wait()
    found = failure(lambda: watch.gathers.all_gather_small(torch.zeros(1), name="x"))
    watch.close(found[0])
    return found


def test_a_barrier_on_one_rank_and_a_collective_on_the_other_end_in_words():
    results = run_ranks(waits_by_itself, 2, False, expect_death={0: 75}, timeout=40)
    kind, text, _ = results[1]
    assert kind == "RankDivergence"
    for words in (text, results[0].output):
        assert "  rank 0: waiting in torch.distributed.barrier (test_stalls.py:" in words
        assert "  rank 1: waiting in exchange 'x'" in words
        assert "Neither can continue" in words


def test_a_barrier_that_a_rank_does_not_come_to_is_named():
    results = run_ranks(waits_by_itself, 2, True, expect_death={0: 75, 1: 75}, timeout=40)
    for death in results:
        assert "RankLate" in death.output
        assert "  rank 0: waiting in torch.distributed.barrier (test_stalls.py:" in death.output
        assert "  rank 1: outside collectives, test_stalls.py:" in death.output
