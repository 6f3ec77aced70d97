"""The sequences of calls that all ranks take part in, and the call of each that this rank is blocked in.

There are four kinds: the collectives of an engine, the calls of its control group, the set-ups of engines
and models, and the calls that the program itself makes of ``torch.distributed``. The watchdog follows all
of them in one thread; see :mod:`zeroshard.watchdog.watchdog`.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zeroshard.comm.recorder import Item, Recorder
from zeroshard.run.recordings import FlightRecording, Record
from zeroshard.watchdog.diagnosis import SET_UPS
from zeroshard.watchdog.rank_status import Wait, call_text
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stacks import TORCH, call_of_torch


class StallClock:
    """Measures how long the host has been in one call, and decides when to ask the other ranks.

    ``marks_s``: times at which a round is due in any case. A round may take ``round_s``; none begins so
    shortly before a mark that it would still run then.
    """

    def __init__(self, first_s: float, marks_s: Sequence[float] = (), round_s: float = 0.0) -> None:
        self.blocked_s = 0.0
        self._marks_s, self._round_s = marks_s, round_s
        self._mark: Hashable = None
        self._since_s = 0.0
        self._first_s = first_s
        self._due_s = first_s

    def observe(self, now_s: float, mark: Hashable) -> bool:
        """True when a round of questions is due. ``mark`` identifies the wait; None: not waiting.

        Rounds are ``first_s`` apart at first; later an eighth of the time waited so far, up to 15 s.
        """
        if mark is None or mark != self._mark:
            self._mark, self._since_s, self._due_s = mark, now_s, self._first_s
        self.blocked_s = now_s - self._since_s if mark is not None else 0.0
        if mark is None or self.blocked_s < self._due_s:
            return False
        due_s = self.blocked_s + min(15.0, max(self._first_s, self.blocked_s / 8))
        mark_s = next((mark for mark in self._marks_s if mark > self.blocked_s), math.inf)
        self._due_s = mark_s if mark_s < due_s + self._round_s else due_s
        return True


@dataclass(eq=False)
class TrackedCalls:
    """One sequence of calls, as the watchdog follows it. ``label`` is the same on every rank.

    ``wait()``: the call that this rank is blocked in. ``reached()``: the number of its calls.
    ``flight()``: its recording; None if the sequence has none. ``note()`` is called at each look.
    ``peers``: the ranks with the paths of their recordings. ``members``: the ranks that take part; empty:
    all. ``wakers`` wake the main thread from
    a wait in this sequence. ``step_s()``: median time of a step in seconds. ``doubt``: a connection or
    the history is known to be wrong, so the ranks are asked at the next look. ``suspects``: ranks to
    which a connection broke.
    """

    label: str
    settings: WatchdogSettings
    wait: Callable[[], Wait | None]
    reached: Callable[[], int]
    flight: Callable[[], FlightRecording | None] = lambda: None
    note: Callable[[], None] = lambda: None
    peers: Mapping[int, Peer] = field(default_factory=dict)
    wakers: tuple[Callable[[], object], ...] = ()
    step_s: Callable[[], float] = lambda: 0.0
    collective: bool = False
    members: tuple[int, ...] = ()
    recorder: Recorder | None = None
    doubt: bool = False
    report_due_s: float = 0.0

    def __post_init__(self) -> None:
        self.suspects: set[int] = set()
        size = len(self.peers)
        self.clock = StallClock(
            min(5.0, self.settings.report_s() / 2),
            self.settings.judge_frozen_s(size),
            self.settings.answer_s(size),
        )

    def first_report_s(self) -> float:
        """Seconds inside one call until a stall is reported."""
        if self.label == TORCH:  # programs wait there on purpose, e.g. for one that prepares data
            return self.settings.report_limit_s
        return self.settings.report_s(self.step_s())

    def next_report_s(self) -> float:
        """Seconds inside one call until the stall is reported again."""
        blocked_s = self.clock.blocked_s
        return next((t for t in (120.0, 300.0) if t > 1.5 * blocked_s), blocked_s + 600.0)


def calls_of(
    recorder: Recorder,
    label: str,
    settings: WatchdogSettings,
    *,
    peers: Mapping[int, Peer],
    home: Recorder | None = None,
    members: tuple[int, ...] = (),
) -> TrackedCalls:
    """The sequence that ``recorder`` records.

    ``home``: the recorder that knows step and section; None: ``recorder`` itself. ``members``: the ranks
    of a group of a mesh, if these are its collectives.
    """
    main = threading.get_ident()
    rank = recorder.rank
    collective = home is None or bool(members)

    def wait() -> Wait | None:
        item = recorder.oldest_pending()
        if item is None:
            return None
        behind = recorder.waiter not in (0, main)
        return Wait(label, item[0], _words(item), _source(item, rank), behind, collective, members)

    def note() -> None:
        recorder.enter_thread()
        recorder.note_wait()

    def flight() -> FlightRecording:
        item, own = recorder.oldest_pending(), recorder.flight()
        if home is not None:
            own = own._replace(step=home.step, section=home.section)
        return own._replace(waiting=item[0] if item is not None else 0)

    return TrackedCalls(
        label,
        settings,
        wait,
        lambda: recorder.seq,
        flight,
        note,
        peers,
        step_s=(home or recorder).median_step_s,
        collective=collective,
        members=members,
        recorder=recorder,
    )


def newest_of(parts: Iterable[TrackedCalls]) -> TrackedCalls | None:
    """The sequence of collectives with the newest record; None without any."""

    def at_s(part: TrackedCalls) -> float:
        records = part.recorder.records(1) if part.recorder is not None else ()
        return records[-1].at_s if records else -1.0

    return max((part for part in parts if part.recorder is not None), key=at_s, default=None)


def _words(item: Item) -> str:
    seq, entry, _ = item
    return call_text(Record(seq, entry.op, entry.name, 0, ""))


def _source(item: Item, rank: int) -> int | None:
    """The source of a broadcast, the only rank that the others need; None at the source and otherwise."""
    _, _, source = item[1].op.partition("broadcast from ")
    return int(source) if source and int(source) != rank else None


def calls_of_torch() -> int:
    """The number of collectives over all ranks that the program itself has called."""
    count = 0
    if dist.is_initialized() and dist.group.WORLD is not None:
        with contextlib.suppress(RuntimeError):  # not every backend counts
            group: Any = dist.group.WORLD
            count = int(group._get_sequence_number_for_group())
    return count


class SetUps:
    """The sequence of set-ups of engines and models. ``reached``: the number of this rank's set-ups.

    ``members``: the global ranks that set up together; empty: all.
    """

    def __init__(self, members: tuple[int, ...] = ()) -> None:
        self.reached = 0
        self._members = members
        self._label = f"{SET_UPS} of {','.join(map(str, members))}" if members else SET_UPS
        self._wait: Wait | None = None

    @contextlib.contextmanager
    def begin(self, number: int, what: str) -> Iterator[None]:
        """A context for the ``number``-th set-up, from 1, in which all members take part."""
        self.reached = number
        self._wait = Wait(self._label, number, what, members=self._members)
        try:
            yield
        finally:
            self._wait = None

    def followed(self, settings: WatchdogSettings) -> TrackedCalls:
        """The set-ups as a sequence that the watchdog can follow."""
        return TrackedCalls(
            self._label, settings, lambda: self._wait, lambda: self.reached, members=self._members
        )


class CallsOfTorch:
    """The sequence of calls that the program's ``thread`` itself makes of ``torch.distributed``."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seen = 0

    def wait(self) -> Wait | None:
        """The call that the thread is in now."""
        found = call_of_torch(self._thread)
        if found is None:
            return None
        frame, name = found
        # An attribute of the frame that only tracing reads marks a call that was seen before. Keeping the
        # frame would also work, but would keep alive what its callers hold.
        if frame.f_trace_lines:
            frame.f_trace_lines = False
            self._seen += 1
        return Wait(TORCH, self._seen, name)

    def followed(self, settings: WatchdogSettings) -> TrackedCalls:
        """The calls as a sequence that the watchdog can follow."""
        return TrackedCalls(TORCH, settings, self.wait, lambda: 0)
