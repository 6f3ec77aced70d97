"""The test kit reports correctly what happened on the ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support import CASES
from support.parity import (
    adamw,
    assert_close_trajectory,
    engine_run,
    make_batches,
    reference_run,
)
from zeroshard_testing import RankEnd, RanksFailed, on_ranks, run_ranks


@dataclass(frozen=True)
class Point:
    """A class of the test file: results and arguments may be of such."""

    x: int


@pytest.mark.parametrize("scale", [1, 2])
@on_ranks(2)
def test_a_body_runs_on_every_rank_of_one_group(scale):
    value = torch.tensor([float(scale * (dist.get_rank() + 1))])
    dist.all_reduce(value)
    assert value.item() == 3 * scale


@on_ranks(3)
def test_fixtures_arrive_as_values(tmp_path):
    assert isinstance(tmp_path, Path)
    assert dist.get_world_size() == 3


@on_ranks(1)
def test_one_rank_is_a_group_too():
    assert dist.get_world_size() == 1


@on_ranks(2, group=False)
def test_without_a_group_the_body_finds_what_torchrun_sets():
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2


class TestInAClass:
    @on_ranks(2)
    def test_methods_run_on_ranks(self):
        assert dist.get_world_size() == 2


def _describe(point, *, extra):
    return Point(point.x + dist.get_rank()), torch.full((3,), float(dist.get_rank())), extra


def test_results_come_back_in_rank_order():
    results = run_ranks(_describe, 2, Point(5), kwargs={"extra": "e"})
    assert [point.x for point, _, _ in results] == [5, 6]
    assert [tensor.tolist() for _, tensor, _ in results] == [[0.0] * 3, [1.0] * 3]


def _draw():
    return torch.rand(4).tolist()


def test_every_rank_and_every_run_starts_from_the_same_seed():
    first, second = run_ranks(_draw, 2), run_ranks(_draw, 2)
    assert first[0] == first[1] == second[0]


def _environ(name):
    os.environ["ZEROSHARD_KIT_TEST_LEFT"] = "1"
    value = os.environ.get(name)
    del os.environ["ZEROSHARD_KIT_TEST_LEFT"]
    return value


def test_environment_of_the_test_reaches_the_ranks(monkeypatch):
    monkeypatch.setenv("ZEROSHARD_KIT_TEST", "here")
    assert run_ranks(_environ, 2, "ZEROSHARD_KIT_TEST") == ["here", "here"]
    monkeypatch.delenv("ZEROSHARD_KIT_TEST")
    assert run_ranks(_environ, 2, "ZEROSHARD_KIT_TEST") == [None, None]


def _fail_on_rank_1():
    if dist.get_rank() == 1:
        words = ["the", "culprit"]
        assert len(words) == 7
    dist.all_reduce(torch.ones(1))


def test_the_failing_rank_speaks_first_and_blocked_peers_are_named():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_fail_on_rank_1, 3)
    text = str(failed.value)
    assert text.startswith("rank 1 of 3 failed:\nTraceback")
    assert "in _fail_on_rank_1" in text
    assert "zeroshard_testing/worker.py" not in text
    assert "assert 2 == 7" in text, "asserts in ranks show values"
    assert "still blocked: ranks [0, 2]" in text


def test_a_failure_costs_the_next_test_a_fork_only():
    with pytest.raises(RanksFailed):
        run_ranks(_fail_on_rank_1, 2)
    began = time.monotonic()
    run_ranks(_draw, 2)
    assert time.monotonic() - began < 2.0


def _hang_on_rank_0():
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)
    else:
        dist.recv(torch.zeros(1), src=0)


def test_a_hang_ends_in_time_with_the_place_where_it_hangs():
    began = time.monotonic()
    with pytest.raises(RanksFailed, match=r"still blocked: ranks \[0, 1\] after 0.5 s") as failed:
        run_ranks(_hang_on_rank_0, 2, timeout=0.5)
    assert time.monotonic() - began < 5.0
    assert "in _hang_on_rank_0" in str(failed.value)


def _end_rank_1(how):
    dist.barrier()  # a rank that ends while others still connect makes them fail
    if dist.get_rank() == 1:
        print("last words", flush=True)
        if isinstance(how, signal.Signals):
            os.kill(os.getpid(), how)
        elif isinstance(how, int):
            os._exit(how)
        raise ValueError("uncaught")
    return "alive"


def test_a_killed_rank_is_reported_with_its_signal_and_output():
    with pytest.raises(RanksFailed, match="rank 1 of 2 died: killed by SIGKILL") as failed:
        run_ranks(_end_rank_1, 2, signal.SIGKILL)
    assert "last words" in str(failed.value)


@pytest.mark.parametrize(
    ("how", "death"),
    [
        (signal.SIGKILL, RankEnd(-signal.SIGKILL)),
        (signal.SIGABRT, RankEnd(-signal.SIGABRT)),
        (signal.SIGSTOP, RankEnd(-signal.SIGSTOP)),
        (3, RankEnd(3)),
        ("raise", RankEnd(1)),
    ],
)
def test_an_expected_death_is_a_result(how, death):
    expected = how if how != "raise" else 1
    results = run_ranks(_end_rank_1, 2, how, expect_death={1: expected})
    assert results == ["alive", death]
    assert "last words" in results[1].output


def test_an_uncaught_exception_of_an_expected_death_is_printed():
    _, death = run_ranks(_end_rank_1, 2, "raise", expect_death={1: 1})
    assert "ValueError: uncaught" in death.output


@pytest.mark.parametrize("expected", [signal.SIGTERM, 3])
def test_another_death_than_expected_fails(expected):
    with pytest.raises(RanksFailed, match="rank 1 of 2 died: killed by SIGKILL"):
        run_ranks(_end_rank_1, 2, signal.SIGKILL, expect_death={1: expected})


def test_a_rank_that_should_die_but_returns_fails():
    with pytest.raises(RanksFailed, match="rank 0 of 2 returned; its death was expected"):
        run_ranks(_draw, 2, expect_death={0: signal.SIGKILL})


class OddError(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def _raise_two_kinds():
    if dist.get_rank() == 1:
        raise OddError(1, 2)
    raise KeyError("k")


def test_exceptions_can_be_results():
    zero, one = run_ranks(_raise_two_kinds, 2, keep_exceptions=True)
    assert isinstance(zero, KeyError)
    assert str(one) == "OddError: 1 and 2"


def _leave(what):
    if dist.get_rank() == 1:
        if what == "thread":
            threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()
        if what == "dtype":
            torch.set_default_dtype(torch.float64)
        if what == "variable":
            os.environ["ZEROSHARD_KIT_TEST_LEFT"] = "1"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("thread", "rank 1: thread 'idle' still runs"),
        ("dtype", "rank 1: torch.get_default_dtype"),
        ("variable", "rank 1: environment variable ZEROSHARD_KIT_TEST_LEFT is '1', was None"),
    ],
)
def test_what_a_rank_leaves_behind_fails_its_test(what, words):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_leave, 2, what)
    assert words in str(failed.value)


def test_a_local_function_is_refused_with_the_way_out():
    with pytest.raises(TypeError, match="Define it at the top level"):
        run_ranks(lambda: None, 2)


def test_an_argument_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"0 \(function\), lock \(lock\) cannot"):
        run_ranks(_draw, 2, lambda: None, kwargs={"lock": threading.Lock()})


@pytest.mark.parametrize("by_name", [True, False])
def test_a_monkeypatch_is_refused_since_nobody_would_undo_it_there(monkeypatch, by_name):
    args, kwargs = ((), {"patch": monkeypatch}) if by_name else ((monkeypatch,), {})
    with pytest.raises(TypeError, match=rf"'{'patch' if by_name else 0}'.*MonkeyPatch.context\(\)"):
        run_ranks(_draw, 2, *args, kwargs=kwargs)


def _skip():
    pytest.skip("asked for")


def test_a_skip_on_the_ranks_skips_the_test():
    with pytest.raises(pytest.skip.Exception, match="asked for"):
        run_ranks(_skip, 2)


def test_output_of_the_ranks_is_shown(capsys):
    run_ranks(_print, 2)
    assert capsys.readouterr().out == "[rank 0] hello 0\n[rank 1] hello 1\n"


def _print():
    print("hello", dist.get_rank())


def _cuda_is_initialised():
    return torch.cuda.is_initialized()


def test_the_fork_server_has_not_touched_cuda():
    assert run_ranks(_cuda_is_initialised, 2) == [False, False]


def _train(lr):
    batches = make_batches(CASES["mlp"], steps=2, world=2)
    return engine_run(CASES["mlp"], adamw(lr), batches, stage=3, precision="fp64")


def test_a_run_of_the_engine_can_be_held_against_the_oracle():
    batches = make_batches(CASES["mlp"], steps=2, world=2)
    expected = reference_run(CASES["mlp"], adamw(1e-2), batches, precision="fp64")
    for actual in run_ranks(_train, 2, 1e-2):
        assert_close_trajectory(actual, expected, rtol=1e-12)
    for other in run_ranks(_train, 2, 1.001e-2):
        with pytest.raises(AssertionError, match="values differ by more than"):
            assert_close_trajectory(other, expected, rtol=1e-12)
