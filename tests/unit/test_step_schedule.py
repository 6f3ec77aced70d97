"""The streams of a step: how much communication is exposed, in exact seconds."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from zeroshard.planner import schedule
from zeroshard.planner.schedule import Compute, Event, Start, StreamWait, Timing, stretched

GATHER, REDUCE = "all-gather", "reduce-scatter"


def timing(events, *, serial):
    """The time of one rank alone."""
    return schedule.timing([events], serial=serial)[0][0]


def test_a_gather_beside_compute_is_exposed_by_what_it_lasts_longer():
    events = [Start("a", GATHER, 5.0), Compute(3.0), StreamWait("a"), Compute(1.0)]
    assert timing(events, serial=False) == Timing(6.0, 4.0, {GATHER: 5.0}, {GATHER: 2.0}, 0.0)


def test_a_gather_that_ends_before_its_use_costs_nothing():
    events = [Start("a", GATHER, 2.0), Compute(3.0), StreamWait("a"), Compute(1.0)]
    assert timing(events, serial=False) == Timing(4.0, 4.0, {GATHER: 2.0}, {}, 0.0)


def test_a_stream_does_one_thing_after_the_other_and_streams_run_beside_each_other():
    same = [Start("a", GATHER, 2.0), Start("b", GATHER, 2.0), StreamWait("a"), StreamWait("b")]
    assert timing(same, serial=False).total_s == 4.0
    beside = [Start("a", GATHER, 2.0), Start("b", REDUCE, 3.0), StreamWait("a"), StreamWait("b")]
    found = timing(beside, serial=False)
    assert found.total_s == 3.0
    assert found.exposed_s == {GATHER: 2.0, REDUCE: 1.0}


def test_what_a_step_starts_may_end_in_the_next_one():
    events = [Compute(1.0), StreamWait("late"), Compute(2.0), Start("late", GATHER, 2.5)]
    assert timing(events, serial=False) == Timing(4.5, 3.0, {GATHER: 2.5}, {GATHER: 1.5}, 0.0)


def test_a_collective_starts_after_the_compute_before_it():
    events = [Compute(4.0), Start("a", REDUCE, 1.0), StreamWait("a")]
    assert timing(events, serial=False).total_s == 5.0


def test_a_host_that_is_slower_than_the_device_is_waited_for():
    events = [Compute(1.0, 3.0), Compute(1.0, 3.0), Compute(0.0, 0.5)]
    assert timing(events, serial=False) == Timing(7.0, 2.0, {}, {}, 5.0)
    ahead = [Compute(3.0, 1.0), Compute(3.0, 1.0)]
    assert timing(ahead, serial=False) == Timing(7.0, 6.0, {}, {}, 1.0)


def test_one_processor_does_everything_in_turn():
    events = [
        Start("a", GATHER, 2.0, 0.5),
        Compute(3.0, 0.25),
        StreamWait("a"),
        Start("b", GATHER, 1.0),
    ]
    assert timing(events, serial=True) == Timing(6.75, 3.0, {GATHER: 3.0}, {GATHER: 3.0}, 0.75)


@pytest.mark.parametrize("serial", [False, True])
def test_work_between_two_events_counts_as_one(serial):
    rng = random.Random(3)
    events: list[Event] = []
    for at in range(200):
        kind = rng.choice("cccczsw")
        host_s, seconds = rng.random(), rng.choice([0.1, 1.0, 3.0]) * rng.random()
        if kind == "s":
            events.append(Start(f"{at}", rng.choice("ab"), 3 * seconds, host_s))
        elif kind == "w":
            events.append(StreamWait(f"{at - rng.randrange(9)}"))
        else:
            events.append(Compute(0.0 if kind == "z" else seconds, host_s))
    short = list(stretched(events))
    assert len(short) < len(events)
    whole, part = (asdict(timing(each, serial=serial)) for each in (events, short))
    assert part.pop("busy_s") == pytest.approx(whole.pop("busy_s"))
    assert part.pop("exposed_s") == pytest.approx(whole.pop("exposed_s"))
    assert part == pytest.approx(whole)
