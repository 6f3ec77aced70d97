"""Ranks that agree through the last one of them: the answers of a flat exchange, for many sizes."""

from __future__ import annotations

import json
import random
import re
import threading
from collections import Counter
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from zeroshard.comm.agreement import alike_plans, post_plan
from zeroshard.comm.connect import DeviceUse
from zeroshard.comm.host import Process
from zeroshard.comm.store_keys import (
    Missing,
    Rendezvous,
    absent,
    first_pause_s,
    next_pause_s,
    post,
    posts,
    present,
    ranks_key,
)
from zeroshard.errors import RankLate
from zeroshard.session.session import _summary
from zeroshard.watchdog.run_record import Peer, Peers
from zeroshard.watchdog.settings import WatchdogSettings, store_tick_s

SIZES = [*range(1, 34), 63, 64, 65, 100, 127, 199]


def new_store() -> HashStore:
    """A store in which nobody waits long for a key that never comes."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=2))
    return store


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_all_values_in_rank_order(size):
    drawn, store = random.Random(size), new_store()
    values = [f"value {drawn.random()}" for _ in range(size)]
    order = drawn.sample(range(size), size)
    said = [Rendezvous(store, r, size).arrive(values[r], json.dumps, "k") for r in order]
    assert [text is None for text in said] == [True] * (size - 1) + [False]
    for rank in range(size):
        assert json.loads(Rendezvous(store, rank, size, 1).outcome("k")) == values


def test_any_text_can_be_posted():
    store = new_store()
    texts = {3: "", 0: "4 2 ab", 4095: "\0\n é \U0001f600" * 3, 2: " ", 1: "x" * 70_000}
    for count, (rank, text) in enumerate(texts.items(), 1):
        assert absent(store, "k", texts) == list(texts)[count - 1 :]
        assert post(store, "k", rank, text) == count
    assert posts(store, "k") == texts


def test_exchange_waits_for_the_other_ranks():
    store, found = new_store(), {}

    def rank(at: int) -> None:
        found[at] = Rendezvous(store, at, 9, 20).exchange(str(at), "k")

    threads = [threading.Thread(target=rank, args=(at,)) for at in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert set(map(tuple, found.values())) == {tuple("012345678")}
    assert len(found) == 9


@pytest.mark.parametrize("size", SIZES)
def test_plans_are_grouped_as_a_comparison_of_all_would(size):
    drawn, store = random.Random(size), new_store()
    plans = [{"stage": str(drawn.choice([1, 1, 1, 1, 2, 3]))} for _ in range(size)]
    wanted: dict[str, list[int]] = {}
    for rank, plan in enumerate(plans):
        wanted.setdefault(plan["stage"], []).append(rank)
    for rank in drawn.sample(range(1, size), size - 1):
        post_plan(Rendezvous(store, rank, size), plans[rank])
    groups = alike_plans(Rendezvous(store, 0, size, 1), plans[0])
    assert groups == sorted(wanted.values(), key=lambda ranks: (-len(ranks), ranks))


def test_who_is_late_is_named():
    store, heard = new_store(), []
    for rank in (0, 1, 3, 4):
        Rendezvous(store, rank, 7).arrive("", json.dumps, "k")
    with pytest.raises(RankLate, match=re.escape("ranks 2,5,6 did not reach 'k' within 0 s")):
        Rendezvous(store, 0, 7, 0.3, lambda late: heard.append(list(late))).outcome("k")
    assert heard[-1] == [2, 5, 6]


def test_who_is_late_is_asked_only_if_it_is_used():
    asked = []
    late = Missing(lambda: asked.append(0) or [4, 7])
    assert not asked
    assert (len(late), list(late), 7 in late, len(asked)) == (2, [4, 7], True, 1)
    over = iter([None] * 400 + [True])
    checks: list[object] = []
    meeting = Rendezvous(new_store(), 0, 2, 60, checks.append)
    meeting.wait_for(lambda: next(over), lambda: asked.append(0) or [1], "x")
    assert checks
    assert len(asked) == 1


class CountingStore:
    """Counts the requests of one client."""

    def __init__(self, keys: set[str]) -> None:
        self.keys, self.requests = keys, 0

    def check(self, keys: list[str]) -> bool:
        self.requests += 1
        return self.keys.issuperset(keys)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 199])
def test_keys_that_are_there_are_found(size):
    drawn = random.Random(size)
    keys = {rank: f"k/{rank}" for rank in range(size)}
    for missing in {0, 1, size // 3, size}:
        gone = drawn.sample(range(size), missing)
        store = CountingStore({key for rank, key in keys.items() if rank not in gone})
        assert present(store, list(keys.values())) == [keys[r] for r in keys if r not in gone]
        assert store.requests <= 2 * size
        if missing <= 1:
            assert store.requests <= 1 + 2 * missing * size.bit_length()


def test_names_of_sets_of_ranks_are_short_and_differ():
    sets = [range(n) for n in (1, 2, 8, 9, 64, 4096)]
    sets += [range(1, 65), range(0, 128, 2), [*range(63), 127], [0, *range(2, 64), 127]]
    names = [ranks_key(list(ranks)) for ranks in sets]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 40


@pytest.mark.parametrize("size", [2, 64, 512, 4096, 16384])
def test_ranks_that_wait_keep_the_store_idle(size):
    """All together: at most 20,000 looks a second at once, 8,000 after the first ones, then 1,000."""
    pause_s, waited_s, looks = first_pause_s(size), 0.0, Counter()
    while waited_s < 200:
        looks[int(waited_s)] += 1
        waited_s += pause_s
        longer_s = next_pause_s(pause_s, waited_s, size)
        assert longer_s >= pause_s or waited_s >= 1
        pause_s = longer_s
    assert looks[0] * size <= max(600 * size, 20_000)
    assert looks[190] * size <= max(50 * size, 1100)
    assert next_pause_s(0.0005, 0.0, 2) == 0.001, "two ranks wait no longer than before"


def test_the_watchdogs_of_all_ranks_look_a_thousand_times_a_second():
    settings = WatchdogSettings()
    assert [store_tick_s(1.0, size) for size in (2, 1024, 4096)] == [1.0, 1.0, 4.0]
    assert [settings.answer_s(size) for size in (2, 1024, 4096)] == [5.0, 5.0, 12.0]


# ---------------------------------------------------------------- what a rank learns of the others


def cards_of(hosts: dict[int, int]) -> dict[int, list[object]]:
    return {
        rank: [
            {
                "host": f"host-{host}",
                "space": f"boot {host}",
                "pid": 100 + rank,
                "started": f"{rank}",
            },
            f"/recording/{rank}",
            DeviceUse("cuda", f"cuda:{rank % 8}", f"GPU-{rank}", f"host-{host}"),
        ]
        for rank, host in hosts.items()
    }


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64, 199])
@pytest.mark.parametrize("placed", ["in blocks", "round robin", "by chance"])
def test_a_rank_knows_its_own_host_and_the_names_of_the_others(size, placed):
    drawn = random.Random(size)
    place = {
        "in blocks": lambda rank: rank // 8,
        "round robin": lambda rank: rank % 5,
        "by chance": lambda rank: drawn.randrange(5),
    }[placed]
    ranks = sorted(drawn.sample(range(2 * size), size))  # a group that is not all ranks
    cards = cards_of({rank: place(rank) for rank in ranks})
    told, by_space = _summary(ranks, [json.dumps(cards[r]) for r in ranks])
    refused, _, runs = told.partition("\0")
    assert refused == ""
    me = drawn.choice(ranks)
    rows = json.loads(by_space[cards[me][0]["space"]])
    near = {rank: Peer(rank, Process(**process), path) for rank, process, path in rows}
    assert set(near) == {r for r in ranks if cards[r][0]["space"] == cards[me][0]["space"]}
    peers = Peers(near, ranks, runs)
    assert (list(peers), len(peers)) == (ranks, size)
    here = Process(**cards[me][0])
    for rank in ranks:
        peer = peers[rank]
        assert (peer.rank, peer.process.host) == (rank, cards[rank][0]["host"])
        assert peer.is_on(here) == (rank in near)
        if rank in near:
            assert peer == Peer(rank, Process(**cards[rank][0]), cards[rank][1])
    with pytest.raises(KeyError):
        peers[2 * size]
    for rank in set(range(2 * size)) - set(ranks):
        assert rank not in peers


def test_two_ranks_on_one_device_are_refused_with_the_names_of_both():
    cards = cards_of({rank: rank // 8 for rank in range(64)})
    cards[13][2] = cards[9][2]
    told, _ = _summary(range(64), [json.dumps(card) for card in cards.values()])
    assert told.startswith("Ranks train on the same device: ranks 9,13 (cuda:1, GPU-9).")
