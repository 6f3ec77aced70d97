"""Which ranks are named as slow, from times per step; and how the ranks measure and exchange them."""

from __future__ import annotations

import random
import time

import pytest

from zeroshard.comm.recorder import Recorder
from zeroshard.config import load_config
from zeroshard.errors import ConfigError
from zeroshard.watchdog.pace import (
    PARTS,
    Pace,
    StepMarks,
    StepShare,
    find_stragglers,
    straggler_text,
)

Steps = list[list[float]]
"""Own seconds of each rank in each step."""


def shares(steps: Steps) -> dict[int, list[StepShare]]:
    """What the ranks measure if each step ends for all when the slowest rank has done its part."""
    length = len(steps) // PARTS
    ends = [max(step) for step in steps]
    found = {}
    for rank in range(len(steps[0])):
        found[rank] = []
        for at in range(0, length * PARTS, length):
            own = sum(step[rank] for step in steps[at : at + length]) / length
            wait = sum(ends[at : at + length]) / length - own
            found[rank].append(StepShare(own, wait))
    return found


def noisy(rng: random.Random, ranks: int, slow: dict[int, float], noise: float = 0.05) -> Steps:
    return [
        [slow.get(rank, 0.1) * (1 + noise * rng.random()) for rank in range(ranks)]
        for _ in range(50)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1024, 4096])
def test_one_slow_rank_is_named(ranks):
    slow = ranks * 5 // 8
    (found,) = find_stragglers(shares(noisy(random.Random(ranks), ranks, {slow: 0.13})), 1.2)
    assert found.rank == slow
    assert found.slower == pytest.approx(0.3, abs=0.03)
    assert found.waited_s == pytest.approx(0.03, abs=0.004)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1024, 4096])
def test_uneven_data_is_not_named(ranks):
    rng = random.Random(ranks)
    steps = [[rng.choice((0.05, 0.15)) for _ in range(ranks)] for _ in range(50)]
    assert find_stragglers(shares(steps), 1.2) == []


def test_one_long_step_is_not_named():
    steps = noisy(random.Random(0), 8, {})
    steps[20][3] += 30.0  # it wrote a file, for example
    assert find_stragglers(shares(steps), 1.2) == []


def test_a_rank_just_below_the_ratio_is_not_named():
    exact = [[0.1, 0.119] for _ in range(50)]
    assert find_stragglers(shares(exact), 1.2) == []
    assert [s.rank for s in find_stragglers(shares(exact), 1.15)] == [1]


def test_a_rank_for_which_nobody_waits_is_not_named():
    """Its work is beside the step of the others, or the waits are not seen by the host."""
    same = {rank: [StepShare(0.1, 0.05)] * PARTS for rank in range(4)}
    assert find_stragglers({**same, 2: [StepShare(0.2, 0.05)] * PARTS}, 1.2) == []
    assert find_stragglers({**same, 2: [StepShare(0.15, 0.0)] * PARTS}, 1.2)[0].rank == 2


def test_times_that_are_small_beside_the_step_are_not_named():
    """A step of a second, in which the hosts have little to do."""
    same = {rank: [StepShare(0.010, 0.99)] * PARTS for rank in range(4)}
    assert find_stragglers({**same, 1: [StepShare(0.014, 0.986)] * PARTS}, 1.2) == []


def test_several_slow_ranks_are_named_the_worst_first():
    found = find_stragglers(shares(noisy(random.Random(1), 16, {3: 0.15, 9: 0.2}, 0.0)), 1.2)
    assert [each.rank for each in found] == [9, 3]
    text = straggler_text(found, {9: "node1"}.get, 50)
    assert text.startswith(
        "rank 9 (host node1) is 100 % slower than the median over 50 steps: own "
    )
    assert "also slow: 3 (50 %)" in text
    assert "\n" not in text


def test_one_rank_and_no_time_at_all_name_nobody():
    assert find_stragglers({0: [StepShare(1.0, 0.0)]}, 1.2) == []
    assert find_stragglers({rank: [StepShare(0.0, 0.0)] for rank in range(3)}, 1.2) == []


def test_4096_ranks_are_compared_in_a_fraction_of_a_second():
    samples = shares(noisy(random.Random(2), 4096, {77: 0.2}))
    begun_s = time.process_time()
    find_stragglers(samples, 1.2)
    assert time.process_time() - begun_s < 1.0


def test_a_ratio_of_one_or_less_is_an_error():
    with pytest.raises(ConfigError, match=r"trust\.stragglers\.ratio"):
        load_config(
            {"train_micro_batch_size_per_gpu": 1, "trust": {"stragglers": {"ratio": 1.0}}},
            world_size=2,
        )


class MemoryStore:
    """The store that some ranks share."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(int(self.values.get(key, "0")) + amount)
        return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key].encode() for key in keys]

    def compare_set(self, key: str, expected: str, _desired: str) -> bytes:
        return self.values.get(key, expected).encode()


class Ranks:
    """Ranks that train in simulated time. A look of each watchdog follows every step."""

    def __init__(self, monkeypatch, size: int, window: int = 10) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("zeroshard.comm.recorder._monotonic", lambda: self.now_s)
        monkeypatch.setattr("zeroshard.watchdog.pace.time.monotonic", lambda: self.now_s)
        self.store = MemoryStore()
        self.recorders = [Recorder(rank=rank, group_size=size) for rank in range(size)]
        self.paces = [
            Pace(
                lambda operation, _timeout_s: operation(self.store),
                recorder, StepMarks([recorder]),
                label="initialize 0", ranks=range(size), groups=[range(size)],
                host={1: "node1"}.get, ratio=1.2, window=window, tick_s=0.1,
            )
            for recorder in self.recorders
        ]  # fmt: skip
        self.seen: list = []
        self.paces[0].listeners.append(self.seen.append)

    def train(self, steps: int, own_s: list[float]) -> None:
        for _ in range(steps):
            self.now_s += max(own_s)
            for recorder, own in zip(self.recorders, own_s, strict=True):
                recorder.blocked_s += max(own_s) - own
                recorder.mark_step(recorder.step + 1)
            for pace in self.paces[::-1]:
                pace.look()


def test_a_slow_rank_is_printed_once_in_ten_minutes(monkeypatch, capsys):
    ranks = Ranks(monkeypatch, 3)
    ranks.train(300, [0.335, 0.412, 0.335])  # less than ten minutes
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "zeroshard: rank 1 (host node1) is 23 % slower than the median over 10 steps: "
        "own time 412 ms, median 335 ms; the others wait 77 ms for it"
    )
    assert [(text, found[0].rank) for _, text, found in ranks.seen] == [
        (line.removeprefix("zeroshard: "), 1)
    ]
    ranks.train(1600, [0.335, 0.412, 0.335])
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_rank_that_becomes_slow_later_is_named(monkeypatch, capsys):
    ranks = Ranks(monkeypatch, 2)
    ranks.train(100, [0.1, 0.1])
    assert capsys.readouterr().err == ""
    ranks.train(100, [0.1, 0.2])
    assert "rank 1 (host node1) is 100 % slower" in capsys.readouterr().err


def test_a_rank_that_goes_back_a_step_spoils_one_window_only(monkeypatch, capsys):
    ranks = Ranks(monkeypatch, 2)
    ranks.train(12, [0.1, 0.2])
    for recorder in ranks.recorders:
        recorder.mark_step(recorder.step - 3)
    ranks.train(8, [0.1, 0.2])
    ranks.train(100, [0.1, 0.2])
    assert "rank 1 (host node1) is 100 % slower" in capsys.readouterr().err


def test_the_store_keeps_one_key_for_each_rank(monkeypatch):
    ranks = Ranks(monkeypatch, 3)
    ranks.train(500, [0.1, 0.1, 0.1])
    assert set(ranks.store.values) == {
        "pace/initialize 0", "pace/initialize 0/1", "pace/initialize 0/2"
    }  # fmt: skip
