"""In which sequences of calls do all ranks take part, and which call of each is this rank blocked in?

The collectives of an engine are one sequence, its meetings in the store another, the set-ups of
engines and models a third, and the calls of ``torch.distributed`` that a program makes by itself are
seen as a fourth. A sentinel follows all of them in one thread; see :mod:`zeroshard.watchdog.watchdog`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from zeroshard.comm.flight_recorder import FlightRecording, Record
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.watchdog.diagnosis import SET_UPS, TORCH, StallClock, Wait, call_text
from zeroshard.watchdog.rank_status import Peer, call_of_torch
from zeroshard.watchdog.settings import WatchdogSettings


@dataclass(eq=False)
class TrackedCalls:
    """One sequence. ``label`` is the same on every rank.

    ``wait()`` is what this rank is blocked in, ``reached()`` how many calls it has made, ``flight()``
    its history, if it is one of collectives. ``peers``: where the others keep theirs.
    """

    label: str
    trust: WatchdogSettings
    wait: Callable[[], Wait | None]
    reached: Callable[[], int]
    flight: Callable[[], FlightRecording | None] = lambda: None
    note: Callable[[], None] = lambda: None
    peers: Mapping[int, Peer] = field(default_factory=dict)
    wakers: tuple[Callable[[], object], ...] = ()
    step_s: Callable[[], float] = lambda: 0.0
    doubt: bool = False
    report_due_s: float = 0.0

    def __post_init__(self) -> None:
        self.suspects: set[int] = set()
        self.clock = StallClock(min(5.0, self.trust.limits().first_report_s / 2))

    def first_report_s(self) -> float:
        """Seconds in one call until a stall is reported."""
        if self.label == TORCH:  # programs let each other wait on purpose: one prepares the data
            return self.trust.report_limit_s
        return self.trust.limits(self.step_s()).first_report_s

    def next_report_s(self) -> float:
        """When it is reported again."""
        blocked_s = self.clock.blocked_s
        return next((t for t in (120.0, 300.0) if t > 1.5 * blocked_s), blocked_s + 600.0)


def calls_of(
    recorder: Recorder,
    label: str,
    trust: WatchdogSettings,
    *,
    peers: Mapping[int, Peer],
    home: Recorder | None = None,
) -> TrackedCalls:
    """The calls that ``recorder`` records. ``home``: the one that knows step and section."""
    main = threading.get_ident()
    rank = recorder.rank

    def wait() -> Wait | None:
        item = recorder.oldest_pending()
        if item is None:
            return None
        behind = recorder.waiter not in (0, main)
        return Wait(label, item[0], _words(item), _source(item, rank), behind)

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
        trust,
        wait,
        lambda: recorder.seq,
        flight,
        note,
        peers,
        step_s=recorder.median_step_s,
    )


def _words(item: Item) -> str:
    seq, entry, _ = item
    return call_text(Record(seq, entry.op, entry.name, 0, ""))


def _source(item: Item, rank: int) -> int | None:
    """The rank that a broadcast needs; its source may need all."""
    _, _, source = item[1].op.partition("broadcast from ")
    return int(source) if source and int(source) != rank else None


def calls_of_torch() -> int:
    """How many collectives the program has called by itself, over all ranks."""
    count = 0
    if dist.is_initialized() and dist.group.WORLD is not None:
        with contextlib.suppress(RuntimeError):  # not every backend counts
            group: Any = dist.group.WORLD
            count = int(group._get_sequence_number_for_group())
    return count


class SetUps:
    """The set-ups of engines and models, one after the other; ``reached`` counts this rank's."""

    def __init__(self) -> None:
        self.reached = 0
        self._wait: Wait | None = None

    @contextlib.contextmanager
    def begin(self, number: int, what: str) -> Iterator[None]:
        """The ``number``-th set-up, from 1; all ranks meet in it."""
        self.reached = number
        self._wait = Wait(SET_UPS, number, what)
        try:
            yield
        finally:
            self._wait = None

    def followed(self, trust: WatchdogSettings) -> TrackedCalls:
        """As a sequence."""
        return TrackedCalls(SET_UPS, trust, lambda: self._wait, lambda: self.reached)


class CallsOfTorch:
    """What the program's main thread calls of ``torch.distributed`` by itself."""

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._seen = 0

    def wait(self) -> Wait | None:
        """The call that it is in now."""
        found = call_of_torch(self._thread)
        if found is None:
            return None
        frame, name = found
        # A mark that only tracing reads tells this call from a later one. To keep the frame would tell
        # them apart as well, and keep alive what the functions around it hold.
        if frame.f_trace_lines:
            frame.f_trace_lines = False
            self._seen += 1
        return Wait(TORCH, self._seen, name)

    def followed(self, trust: WatchdogSettings) -> TrackedCalls:
        """As a sequence."""
        return TrackedCalls(TORCH, trust, self.wait, lambda: 0)
