"""Ranks that read together find each other, and a rank that reads alone detects it. Ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch.distributed import HashStore

from zeroshard.watchdog.lone_reads import LoneReadCheck, Position, elsewhere, smaller_party
from zeroshard.watchdog.stacks import TORCH

BARRIER = Position(0, {"engine": 5, TORCH: 3}, in_torch="torch.distributed.barrier")


def readers(
    store: Any, rank: int, *, at: Callable[[], Position] = Position, **options
) -> LoneReadCheck:
    """The lone-read check of one of two ranks."""
    lock = threading.Lock()

    def call(operation):
        with lock:
            return operation(store)

    keys = {"gone": lambda _rank: "", "limit_s": 20.0, "size": 2, **options}
    return LoneReadCheck(
        call,
        label="engine",
        rank=rank,
        position=lambda words: at(),
        history=lambda: "7",
        report_s=10.0,
        **keys,
    )


def test_two_ranks_that_read_the_same_find_each_other():
    store = HashStore()
    found = []
    thread = threading.Thread(target=lambda: found.append(readers(store, 1).alone("head")))
    thread.start()
    assert readers(store, 0).alone("head") == ""
    thread.join()
    assert found == [""]


def test_a_wait_ends_at_its_limit_and_the_next_read_from_there_costs_nothing():
    store = HashStore()
    reader = readers(store, 0, limit_s=0.05)
    assert reader.alone("head") == "no other rank reached it within 0 s"
    keys = store.num_keys()
    assert reader.alone("body") == "no other rank reached it within 0 s"
    assert store.num_keys() == keys


def test_a_rank_that_moved_on_since_it_read_alone_waits_again():
    store, place, found = HashStore(), [1], []
    reader = readers(store, 0, limit_s=0.05, at=lambda: Position(0, {"engine": place[0]}))
    assert reader.alone("head")
    place[0] = 2
    thread = threading.Thread(target=lambda: found.append(readers(store, 1).alone("head")))
    thread.start()
    while (
        store.add("reads/engine/7/head", 0) < 1
    ):  # the other waits at the key that was left before
        pass
    assert reader.alone("head") == ""
    thread.join()
    assert found == [""]


def test_a_rank_that_is_gone_is_not_waited_for():
    reader = readers(HashStore(), 0, gone=lambda rank: f"rank {rank} ended" if rank else "")
    assert reader.alone("head") == "rank 1 has left (rank 1 ended)"


def test_who_was_about_to_leave_stays_if_the_last_rank_has_come():
    store = HashStore()
    reader = readers(store, 0)
    key = "reads/engine/7/head"

    def comes(_rank: int) -> str:
        store.add(key, 1)  # after this rank looked at the count, and before it leaves
        return "ended"

    reader._gone = comes
    assert reader.alone("head") == ""
    assert store.add(key, 0) == 2  # for the other to see


def test_a_rank_says_where_it_is_only_when_it_was_asked():
    store = HashStore()
    other = readers(
        store, 1, at=lambda: Position(0, {"engine": 9}, {"engine": "gather 'body' (#9)"})
    )
    other.answer()
    assert not store.check(["reads/engine/at/1"])
    stop = threading.Event()

    def tick():
        while not stop.wait(0.01):
            other.answer()

    thread = threading.Thread(target=tick)
    thread.start()
    reader = readers(store, 0, at=lambda: Position(0, {"engine": 8}))
    assert reader.alone("head") == "rank 1 is in gather 'body' (#9)"
    stop.set()
    thread.join()


def test_a_call_of_the_program_s_own_counts_while_a_rank_stays_in_it():
    mine = Position(0, {"engine": 5, TORCH: 2})
    assert elsewhere(mine, BARRIER, BARRIER) == "in torch.distributed.barrier()"
    assert elsewhere(mine, BARRIER, None) == ""
    assert elsewhere(mine, Position(0, {TORCH: 3}), Position(0, {TORCH: 3})) == ""  # it has left it
    assert elsewhere(Position(0, {TORCH: 3}), BARRIER, BARRIER) == ""  # this rank was in it too


def test_a_rank_that_is_behind_or_unknown_may_still_come():
    mine = Position(0, {"engine": 5, "other": 2})
    assert elsewhere(mine, Position(0, {"engine": 4, "of others": 9}), None) == ""


def test_a_meeting_counts_while_a_rank_waits_in_it_for_this_one():
    saves = Position(0, {"saves": 3}, wait=("saves", 3, "meet 'done' (#3)", None))
    assert elsewhere(Position(0, {"saves": 2}), saves, None) == "in meet 'done' (#3)"
    assert elsewhere(Position(0, {"saves": 3}), saves, None) == ""
    assert (
        elsewhere(Position(0, {"saves": 2}), Position(0, {"saves": 3}), None) == ""
    )  # a second thread
    of_another = Position(0, {"saves": 3}, wait=("saves", 3, "broadcast from 2 'done' (#3)", 2))
    assert elsewhere(Position(0, {"saves": 2}), of_another, None) == ""
    assert elsewhere(Position(2, {"saves": 2}), of_another, None)


def test_the_larger_party_goes_on_and_of_two_alike_the_one_without_the_lowest_rank():
    reads = {0: "a", 1: "b", 2: "b", 3: "a", 4: "b"}
    assert [smaller_party(rank, reads) for rank in reads] == ["b", "", "", "b", ""]
    reads = {0: "a", 1: "b", 2: "b", 3: "a"}
    assert [smaller_party(rank, reads) for rank in reads] == ["b", "", "", "b"]
