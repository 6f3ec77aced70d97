"""When the launcher ends a group of processes, and in which order it stops them."""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest

from zeroshard.launch.supervisor import Phase, ShutdownTimeouts, WorkerSupervisor


@dataclass
class FakeProcess:
    """A process whose exit code the test sets."""

    pid: int
    code: int | None = None

    def poll(self) -> int | None:
        return self.code


class FakeProcesses:
    """Two or more fake ranks, a clock that the test moves, and the signals sent so far."""

    def __init__(self, count: int = 2, save_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.sent: list[tuple[int, signal.Signals]] = []
        self.asked: list[tuple[int, signal.Signals]] = []
        self.stopped: set[int] = set()
        self.said: list[str] = []
        self.ranks = {rank: FakeProcess(100 + rank) for rank in range(count)}
        self.supervisor = WorkerSupervisor(
            self.ranks,
            timeouts=ShutdownTimeouts(grace_s=5, stop_s=30, save_s=save_s),
            send=lambda rank, _, number: self.sent.append((rank, number)),
            ask=lambda rank, _, number: self.asked.append((rank, number)),
            clock=lambda: self.now_s,
            stopped=lambda pid: pid - 100 in self.stopped,
            say=self.said.append,
        )

    def tick(self, at_s: float) -> bool:
        self.now_s = at_s
        return self.supervisor.tick()


@pytest.fixture
def fake() -> FakeProcesses:
    return FakeProcesses()


def test_a_herd_runs_until_the_last_member_ended(fake):
    fake.ranks[0].code = 0
    assert not fake.tick(1)
    fake.ranks[1].code = 0
    assert fake.tick(2)


def test_a_clean_end_of_one_member_stops_nobody(fake):
    fake.ranks[0].code = 0
    fake.tick(1)
    fake.tick(1000)
    assert fake.sent == []


def test_a_rank_that_a_signal_has_stopped_is_named_once(fake):
    fake.stopped = {1}
    for at_s in range(10):
        fake.tick(at_s)
    assert len(fake.said) == 1
    assert fake.said[0].startswith("rank 1 is stopped by a signal")
    assert "`kill -CONT 101`" in fake.said[0]
    fake.stopped = set()
    fake.tick(20)
    fake.stopped = {1}
    for at_s in range(21, 100):
        fake.tick(at_s)
    assert len(fake.said) == 2
    assert fake.sent == []


def test_a_run_that_the_user_has_stopped_is_left_alone(fake):
    fake.stopped = {0, 1}
    for at_s in range(1000):
        fake.tick(at_s)
    assert (fake.said, fake.sent) == ([], [])


def test_a_stopped_rank_that_is_left_alone_is_killed_after_a_minute(fake):
    fake.ranks[0].code = 0
    fake.tick(0)
    fake.stopped = {1}
    for at_s in range(1, 60):
        fake.tick(at_s)
    assert (len(fake.said), fake.sent) == (1, [])
    fake.tick(61)
    assert fake.sent == [(1, signal.SIGKILL)]
    fake.ranks[1].code = -9
    assert fake.tick(62)
    assert [death.frozen for death in fake.supervisor.deaths] == [False, True]


def test_the_minute_begins_when_all_others_have_ended(fake):
    """A rank that was stopped for almost as long as it may be must not be killed then."""
    fake.stopped = {1}
    for at_s in range(55):
        fake.tick(at_s)
    fake.ranks[0].code = 0
    for at_s in range(55, 115):
        fake.tick(at_s)
    assert fake.sent == []
    fake.tick(116)
    assert fake.sent == [(1, signal.SIGKILL)]


def test_deaths_carry_the_time_at_which_they_were_seen(fake):
    fake.ranks[1].code = 3
    fake.tick(7)
    assert [(d.rank, d.exitcode, d.at_s) for d in fake.supervisor.deaths] == [(1, 3, 7)]


def test_survivors_of_a_failure_are_left_alone_for_the_grace_time(fake):
    fake.ranks[1].code = 1
    fake.tick(0)
    fake.tick(4.9)
    assert (fake.supervisor.phase, fake.sent) == (Phase.GRACE, [])


def test_survivors_are_stopped_after_the_grace_time(fake):
    fake.ranks[1].code = 1
    fake.tick(0)
    fake.tick(5)
    assert fake.sent == [(0, signal.SIGTERM)]


def test_who_does_not_stop_is_killed(fake):
    fake.ranks[1].code = 1
    for at_s in (0, 5, 34.9, 35):
        fake.tick(at_s)
    assert fake.sent == [(0, signal.SIGTERM), (0, signal.SIGKILL)]


def test_a_death_after_the_order_to_stop_is_marked(fake):
    fake.ranks[1].code = 1
    fake.tick(0)
    fake.tick(5)
    fake.ranks[0].code = -15
    fake.tick(6)
    assert [(d.rank, d.stopped) for d in fake.supervisor.deaths] == [(1, False), (0, True)]


def test_an_interrupt_is_forwarded_and_waited_for(fake):
    fake.supervisor.interrupt(signal.SIGINT)
    fake.tick(29)
    assert fake.sent == [(0, signal.SIGINT), (1, signal.SIGINT)]


def test_a_second_interrupt_kills(fake):
    fake.supervisor.interrupt(signal.SIGINT)
    fake.supervisor.interrupt(signal.SIGINT)
    assert fake.sent[2:] == [(0, signal.SIGKILL), (1, signal.SIGKILL)]


def test_an_interrupt_that_is_not_obeyed_ends_in_a_kill(fake):
    fake.supervisor.interrupt(signal.SIGTERM)
    fake.tick(30)
    assert fake.sent[2:] == [(0, signal.SIGKILL), (1, signal.SIGKILL)]


def test_nobody_who_ended_is_signalled_again():
    fake = FakeProcesses(3)
    fake.ranks[0].code = 0
    fake.tick(1)
    fake.supervisor.interrupt(signal.SIGINT)
    assert [rank for rank, _ in fake.sent] == [1, 2]


def test_an_interrupt_during_the_grace_time_leaves_the_failure_as_the_cause(fake):
    fake.ranks[1].code = 1
    fake.tick(0)
    fake.supervisor.interrupt(signal.SIGINT)
    assert (fake.supervisor.interrupted, fake.sent) == (None, [(0, signal.SIGINT)])


def test_a_stopped_rank_is_killed_as_soon_as_another_one_failed(fake):
    fake.stopped = {1}
    fake.tick(0)
    assert fake.sent == []  # alone, a stop is no failure: a debugger may hold the rank
    fake.ranks[0].code = 1
    fake.tick(1)
    assert fake.sent == [(1, signal.SIGKILL)]
    fake.ranks[1].code = -9
    fake.tick(2)
    assert [(d.rank, d.stopped, d.frozen) for d in fake.supervisor.deaths] == [
        (0, False, False),
        (1, False, True),
    ]


def test_a_stopped_rank_is_killed_at_once_by_an_interrupt(fake):
    fake.stopped = {1}
    fake.supervisor.interrupt(signal.SIGTERM)
    assert fake.sent[0] == (1, signal.SIGKILL)
    assert (0, signal.SIGTERM) in fake.sent


def test_ranks_have_time_to_save_after_a_signal_and_their_workers_do_not_get_it():
    fake = FakeProcesses(save_s=20)
    fake.supervisor.interrupt(signal.SIGUSR1)
    fake.tick(19.9)
    assert fake.asked == [(0, signal.SIGUSR1), (1, signal.SIGUSR1)]
    assert (fake.supervisor.phase, fake.sent) == (Phase.SAVING, [])
    for process in fake.ranks.values():
        process.code = 0
    assert fake.tick(19.95)
    assert fake.supervisor.has_saved


@pytest.mark.parametrize("cause", ["time", "signal"])
def test_who_does_not_save_is_stopped_then_killed(cause):
    fake = FakeProcesses(save_s=20)
    fake.supervisor.interrupt(signal.SIGTERM)
    if cause == "time":
        fake.tick(20)
    else:
        fake.supervisor.interrupt(signal.SIGINT)
    assert fake.sent == [(0, signal.SIGTERM), (1, signal.SIGTERM)]
    fake.ranks[0].code = 0
    fake.tick(50)
    assert fake.sent[2:] == [(1, signal.SIGKILL)]
    fake.ranks[1].code = -9
    assert fake.tick(51)
    assert not fake.supervisor.has_saved


def test_a_rank_that_fails_while_others_save_ends_them_after_the_grace_time():
    fake = FakeProcesses(save_s=20)
    fake.supervisor.interrupt(signal.SIGTERM)
    fake.ranks[1].code = 1
    fake.tick(1)
    fake.tick(6)
    assert fake.sent == [(0, signal.SIGTERM)]
    assert not fake.supervisor.has_saved


def test_a_clean_end_after_a_signal_is_no_save_without_time_for_it(fake):
    fake.supervisor.interrupt(signal.SIGTERM)
    for process in fake.ranks.values():
        process.code = 0
    assert fake.tick(1)
    assert not fake.supervisor.has_saved
