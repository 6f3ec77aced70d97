"""What a rank asks of the store does not grow with the number of ranks. Counted, not timed.

The ranks are those of ``benchmarks/control_plane.py``: threads that run the code of a rank that talks to
the store, against a real TCPStore. They share one connection, so that the test opens few.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import control_plane
from control_plane import HOST_RANKS, CountedStore, Rank

from zeroshard.comm.host import this_process
from zeroshard.watchdog.inquiry import Inquiry, own_answer
from zeroshard.watchdog.messages import Messages
from zeroshard.watchdog.run_record import Peer, read_ranks
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import StallClock, TrackedCalls

POLLS = ("look", "add")
"""Operations that a rank repeats while it waits."""
GATHERS = 5
"""Gathers of a save: its four rounds, and one at its end."""
REQUESTS: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "join": (
        {"append": 1, "add": 1, "look": 1, "check": 1},
        {"set": 1},
    ),
    "watch": ({"add": 2, "set": 1}, {"add": 5}),  # the first looks come soon
    "agree": (
        {"append": 1, "add": 2, "look": 2, "set": 1},
        {"set": 2, "multi_set": 1, "look": 3},
    ),
    "follow": ({}, {}),
    "save": (
        {"append": GATHERS, "add": GATHERS, "look": GATHERS - 1},
        {"set": GATHERS - 1, "look": GATHERS, "delete": 3 * GATHERS - 1},
    ),
}
"""What each rank asks, and what one rank asks more often than the others: the one that comes last, or
rank 0. A wait counts as one request. ``set``, ``append`` and ``multi_set`` are no round trips: the store
does not answer them.
"""


class WaitsCountedOnce(CountedStore):
    """Counts what a rank repeats only for the first time."""

    seen: set[tuple[str, str]]

    def __init__(self, prefix, store, counts) -> None:
        super().__init__(prefix, store, counts)
        self.seen = vars(counts).setdefault("seen", set())

    def _note(self, what, keys, sent, requests=1):
        key = what, self.prefix + keys[0]
        repeats = what in POLLS and (key in self.seen or "/left/" in key[1])
        self.seen.add(key)
        return [self.prefix + keys[0]] if repeats else super()._note(what, keys, sent, requests)


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
    monkeypatch.setattr("zeroshard.run.recordings.recording_dir", lambda run: tmp_path / run)
    made: list[Rank] = []

    def make(size: int) -> list[Rank]:
        shared = Shared(server)
        ranks = [Rank(rank, size, 0) for rank in range(size)]
        for rank in ranks:
            rank.store = WaitsCountedOnce(f"{tmp_path}/{size}/", shared, rank.counts)
        made.extend(ranks)
        return ranks

    yield make
    for rank in made:
        if rank.watchdog is not None:
            rank.watchdog.close()
        rank.__dict__.clear()
    made.clear()
    gc.collect()  # unmaps the recordings


def act(ranks: list[Rank], name: str, *, watchdogs: bool = False) -> list[Counter[str]]:
    """Let all ranks do ``name``; what each, or its watchdog, has asked for it."""
    counters = [rank.watchdog_counts if watchdogs else rank.counts for rank in ranks]
    before = [Counter(each) for each in counters]
    _, error = control_plane.play(ranks, name)
    assert not error, error
    after = [Counter(each) for each in counters]
    for one, other in zip(after, before, strict=True):
        one.subtract(other)
    return after


def most(counts: Iterable[Counter[str]], what: str) -> int:
    return max(one[what] for one in counts)


def asked(counts: Sequence[Counter[str]], pick: Callable[..., int]) -> dict[str, int]:
    """``pick``, min or max, of what ranks have asked, by operation."""
    kinds = set().union(*counts) - {"in", "out"}
    return {what: n for what in sorted(kinds) if (n := pick(one[what] for one in counts))}


@pytest.mark.parametrize("size", [8, 64])
def test_a_start_a_save_and_a_verdict_cost_a_rank_the_same_with_8_and_with_64(
    size, ranks_of, monkeypatch
):
    monkeypatch.setenv("CONTROL_PLANE_IDLE_S", "2.2")
    ranks = ranks_of(size)
    for name in ("join", "watch", "agree", "follow", "save"):
        counts = act(ranks, name, watchdogs=name == "watch")
        each, one = REQUESTS[name]
        assert asked(counts[name == "save" :], min) == each, name  # rank 0 decides in a save
        most_asked = asked(counts, max)
        assert {w: n for w, n in most_asked.items() if n > (each | one).get(w, 0)} == {}, name
        # No key, and no value but that of the last rank, is longer with more ranks.
        assert min(one["in"] for one in counts) <= 6000, name
    everyone = read_ranks(next(Path(ranks[0].settings.dump_dir).iterdir())).peers
    assert [peer.process.host for peer in everyone.values()] == [
        f"host-{rank // HOST_RANKS}" for rank in range(size)
    ], "rank 0 leaves the processes of all hosts for other programs"
    act(ranks, "rest")  # the first looks
    idle = act(ranks, "rest", watchdogs=True)
    assert most(idle, "add") <= 3  # once a second, for 2.2 s
    assert max(map(control_plane.requests_of, idle)) == most(idle, "add")
    for rank in ranks:  # so that the test does not take ten seconds
        rank.session.parts[0].clock = StallClock(0.2)
        rank.session.settings = replace(rank.settings, tick_s=0.2)
    counts = act(ranks, "diverge", watchdogs=True)
    assert {what: most(counts, what) for what in ("append", "set", "check")} == {
        "append": 1, "set": 3, "check": 1,
    }  # fmt: skip
    assert sorted(one["set"] for one in counts)[-2:] == [1, 3], "the rank that asks publishes"
    assert most(counts, "multi_get") <= 40
    assert max(map(control_plane.requests_of, counts)) <= 150


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
