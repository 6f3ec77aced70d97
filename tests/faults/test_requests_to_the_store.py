"""What a rank asks of the store does not grow with the number of ranks. Counted, not timed.

The ranks are those of ``benchmarks/control_plane.py``: threads that run the code of a rank that talks to
the store, against a real TCPStore. They share one connection, so that the test opens few.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from pathlib import Path
from statistics import median

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import control_plane
from control_plane import CountedStore, Rank

from zeroshard.comm.host import this_process
from zeroshard.watchdog.inquiry import Inquiry, own_answer
from zeroshard.watchdog.messages import Messages
from zeroshard.watchdog.rank_status import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import TrackedCalls

POLLS = ("check", "add")
"""Operations that a rank repeats while it waits. The others are counted exactly."""


class Shared:
    """One connection for all ranks: each waits for its turn, and none waits inside a request."""

    def __init__(self, store: dist.TCPStore) -> None:
        self.store, self.turn = store, threading.Lock()

    def clone(self) -> Shared:
        return self

    def __getattr__(self, name: str):
        def ask(*args):
            with self.turn:
                return getattr(self.store, name)(*args)

        return ask


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)


@pytest.fixture
def ranks_of(server, monkeypatch, tmp_path):
    """Makes ``size`` ranks in a key space of their own."""
    control_plane.let_threads_be_ranks(monkeypatch.setattr)
    monkeypatch.setattr("zeroshard.comm.recorder.recording_dir", lambda run: tmp_path / run)
    made: list[Rank] = []

    def make(size: int) -> list[Rank]:
        shared = Shared(server)
        ranks = [Rank(rank, size, 0) for rank in range(size)]
        for rank in ranks:
            rank.store = CountedStore(f"{tmp_path}/{size}/", shared, rank.counts)
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        if rank.watchdog is not None:
            rank.watchdog.close()
        rank.__dict__.clear()
    made.clear()
    gc.collect()  # unmaps the recordings


def act(ranks: list[Rank], name: str) -> list[Counter[str]]:
    """Let all ranks do ``name``; what each has asked for it."""
    before = [Counter(rank.counts) for rank in ranks]
    _, error = control_plane.play(ranks, name)
    assert not error, error
    after = [Counter(rank.counts) for rank in ranks]
    for one, other in zip(after, before, strict=True):
        one.subtract(other)
    return after


def most(counts: list[Counter[str]], what: str) -> int:
    return max(one[what] for one in counts)


def test_a_start_and_a_save_cost_each_of_64_ranks_what_they_cost_each_of_8(ranks_of, monkeypatch):
    monkeypatch.setenv("CONTROL_PLANE_IDLE_S", "2.2")
    sizes = {size: ranks_of(size) for size in (8, 64)}
    for name in ("join", "watch", "agree", "follow", "save"):
        few, many = (act(ranks, name) for ranks in sizes.values())
        for what in ("set", "get", "multi_get", "delete"):
            usual = median(one[what] for one in many)
            assert usual == median(one[what] for one in few), (name, what)
            # Rank 0 gathers five times, with two requests; the last to come gathers once.
            assert most(many, what) <= usual + 10, (name, what)
        for what in POLLS:
            assert most(many, what) <= most(few, what) + 60, (name, what)
        # No key, and no list of keys but that of the last rank, is longer with more ranks.
        per_request = [
            median(one["in"] / control_plane.requests_of(one) for one in counts)
            for counts in (few, many)
            if name != "follow"  # asks nothing
        ]
        assert not per_request or per_request[1] <= 1.2 * per_request[0] + 20, (name, per_request)
    act(sizes[64], "rest")  # the first looks
    idle = act(sizes[64], "rest")
    assert most(idle, "add") <= 3  # once a second, for 2.2 s
    assert max(map(control_plane.requests_of, idle)) == most(idle, "add")


def asked_by_one(server: dist.TCPStore, space: str, size: int) -> tuple[Counter[str], str]:
    """What the rank that asks all others asks of the store, when all have answered; and its diagnosis."""
    here, settings = this_process(), WatchdogSettings(stacks=False, tick_s=0.1)
    shared, counts = Shared(server), [Counter() for _ in range(size)]
    messages = [
        Messages(
            CountedStore(f"{space}/{size}/", shared, counts[rank]),
            Peer(rank, here, f"{space}/{rank}"),
            store_rank=None,
            hung_up=lambda: False,
        )
        for rank in range(size)
    ]
    calls = TrackedCalls("engine", settings, lambda: None, lambda: 0)
    words = own_answer([calls], calls, left=None, main=0, keep=1, with_stacks=False)
    try:
        for one in messages:
            one.post_card("on")
        for one in messages[1:]:
            one.answer(1, words)
        counts[0].clear()
        inquiry = Inquiry(0, range(size), here, messages[0], threading.Event())
        diagnosis = inquiry.ask(1, calls, settings, words)
    finally:
        for one in messages:
            one.close()
    return counts[0], diagnosis.text.partition("\n")[0]


def test_a_verdict_over_64_ranks_takes_as_many_requests_as_one_over_8(server, tmp_path):
    few, text = asked_by_one(server, str(tmp_path), 8)
    assert "(8 of 8 ranks answered" in text
    many, text = asked_by_one(server, str(tmp_path), 64)
    assert "(64 of 64 ranks answered" in text
    assert control_plane.requests_of(many) == control_plane.requests_of(few) < 20


def test_one_silent_rank_does_not_make_the_asker_ask_all_others_again(
    server, tmp_path, monkeypatch
):
    real, size = Messages.answer, 64
    monkeypatch.setattr(
        Messages, "answer", lambda self, *args: self._own.rank != 40 and real(self, *args)
    )
    asked, text = asked_by_one(server, str(tmp_path), size)
    assert "(63 of 64 ranks answered" in text
    assert asked["check"] <= 40 * size.bit_length(), (
        "looks for the silent one, at most 33 times a second"
    )
    assert asked["multi_get"] <= 2 * (2 + 17)
