"""When the events of a step run on one rank of each pipeline stage, which wait for each other.

Every rank has its events in the order in which the engine's schedule makes them. A rank stops where it
needs a message that was not sent yet, or a collective that another stage has not come to. So the bubble
is not computed: it is what ranks wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from zeroshard.planner.schedule import (
    COMPUTE,
    BusySpan,
    Compute,
    Event,
    Start,
    StreamWait,
    Stretch,
    Timing,
)

MESSAGES = "messages"
"""The stream of messages between stages. What a rank sends goes one after the other."""


@dataclass(frozen=True, slots=True)
class Send:
    """A message that begins when the compute stream and the host have come here.

    ``key``: the same for its :class:`Arrival`, and for a wait of the sender. ``seconds``: on its way; on
    one processor, what the sender does for it.
    """

    key: str
    seconds: float
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """The compute stream waits for the message with this key that comes next.

    ``seconds``: on its way; on one processor, what the receiver does for it.
    """

    key: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class JointStart:
    """A :class:`Start` of a collective in which ranks of other stages take part, too.

    ``members``: how many of the ranks that are looked at. It begins when all of them have come to it.
    """

    key: str
    stream: str
    seconds: float
    members: int
    host_s: float = 0.0


StageStep: TypeAlias = Event | Send | Arrival | JointStart


def pipeline_timing(
    ranks: Sequence[Sequence[StageStep]], *, serial: bool
) -> list[tuple[Timing, Sequence[BusySpan]]]:
    """The second of two equal steps of each rank, and when each of its events runs, in their order.

    A step of all ranks ends when that of the last one does. ``serial`` as in
    :func:`~zeroshard.planner.schedule.timing`.

    Raises:
        ValueError: the ranks wait for each other without end.
    """
    board = _Board()
    clocks = [_Rank(events, board, serial) for events in ranks]
    for _ in range(2):
        for clock in clocks:
            clock.begin()
        running = [(clock, clock.run()) for clock in clocks]
        while running:
            before = sum(clock.moves for clock in clocks)
            running = [each for each in running if next(each[1], None) is not None]
            if running and before == sum(clock.moves for clock in clocks):
                raise ValueError("the pipeline stages wait for each other without end")
        end = max(clock.now for clock in clocks)
        for clock in clocks:
            clock.end(end)
        board.forget()
    return [(clock.timing, clock.done_spans) for clock in clocks]


@dataclass
class _Board:
    """What the ranks of a step know of each other, by key and number of the call in the step."""

    sent: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # begin, end
    joined: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def forget(self) -> None:
        """The step is over."""
        self.sent.clear()
        self.joined.clear()


class _Rank:
    """Host, compute stream and other streams of one rank."""

    def __init__(self, events: Sequence[StageStep], board: _Board, serial: bool) -> None:
        self._events, self._board, self._serial = events, board, serial
        self.at = 0  # events of the step that have run
        self.moves = 0  # what others may have waited for, since the first step
        self._began_s = self._host_at = self._compute_at = 0.0
        self._stream_at: dict[str, float] = {}
        # By key: stream, when other stages had come to it, and end.
        self._ends: dict[str, tuple[str, float, float]] = {}
        self._joining: dict[str, tuple[JointStart, int, int]] = {}  # by stream: number, place
        self._calls: Counter[tuple[type, str]] = Counter()
        self._compute_s = self._idle_s = self._stages_s = 0.0
        self._busy_s: dict[str, float] = {}
        self._exposed_s: dict[str, float] = {}
        self._spans: list[BusySpan | None] = []

    @property
    def now(self) -> float:
        """Where the host and the compute stream are."""
        return max(self._host_at, self._compute_at)

    @property
    def timing(self) -> Timing:
        """Of the step that was run last."""
        return Timing(
            self._compute_at - self._began_s, self._compute_s, self._busy_s, self._exposed_s,
            self._idle_s, self._stages_s,
        )  # fmt: skip

    @property
    def done_spans(self) -> Sequence[BusySpan]:
        """Of the step that was run last."""
        assert None not in self._spans
        return [span for span in self._spans if span is not None]

    def begin(self) -> None:
        """Begin a step."""
        self.at = 0
        self._calls.clear()
        self._compute_s = self._idle_s = self._stages_s = 0.0
        self._busy_s, self._exposed_s = {}, {}
        self._began_s, self._spans = self._compute_at, [None] * len(self._events)

    def end(self, at_s: float) -> None:
        """End the step when the last rank does."""
        self._idle_s += max(0.0, self._host_at - self._compute_at)
        self._stages_s += at_s - self.now
        self._host_at = self._compute_at = at_s

    def run(self) -> Iterator[bool]:
        """Run a step. Yields where another rank must go on first."""
        while self.at < len(self._events):
            event = self._events[self.at]
            if isinstance(event, Compute):
                self._compute(event)
            elif isinstance(event, Stretch):
                self._stretch(event)
            elif isinstance(event, Arrival):
                yield from self._receive(event)
            else:
                yield from self._after_its_stream(event)
            self.at += 1
            self.moves += 1
        for stream in list(self._joining):
            yield from self._join_when_possible(stream)

    def _receive(self, event: Arrival) -> Iterator[bool]:
        key = event.key, self._calls[Arrival, event.key]
        while key not in self._board.sent:
            yield True
        self._calls[Arrival, event.key] += 1
        self._arrive(event, *self._board.sent[key])

    def _after_its_stream(self, event: Start | Send | JointStart | StreamWait) -> Iterator[bool]:
        """Run an event when the collective that its stream is in has begun."""
        stream = self._stream_of(event)
        if stream in self._joining:
            yield from self._join_when_possible(stream)
        if isinstance(event, Start):
            self._start(event.stream, event.key, event.seconds, event.host_s)
        elif isinstance(event, Send):
            self._send(event)
        elif isinstance(event, JointStart):
            self._come_to(event)
            if self._serial:
                yield from self._join_when_possible(event.stream)
        else:
            self._wait(event.key)

    def _join_when_possible(self, stream: str) -> Iterator[bool]:
        while not self._can_join(stream):
            yield True
        self._join(stream)

    def _stream_of(self, event: StageStep) -> str:
        """The stream whose last collective must have begun before the event can."""
        if isinstance(event, Send):
            return MESSAGES
        if isinstance(event, (Start, JointStart)):
            return event.stream
        key = event.key if isinstance(event, StreamWait) else ""
        return next((s for s, (joint, _, _) in self._joining.items() if joint.key == key), "")

    # ------------------------------------------------------------------ work

    def _compute(self, event: Compute) -> None:
        self._host(event.host_s)
        begin = self._compute_at
        if event.seconds:
            self._idle_s += max(0.0, self._host_at - begin)
            begin = max(begin, self._host_at)
            self._move_to(begin + event.seconds)
            self._compute_s += event.seconds
        self._note(COMPUTE, begin, self._compute_at)

    def _stretch(self, event: Stretch) -> None:
        begin, host_begin = self._compute_at, self._host_at
        self._host(event.host_s)
        if self._serial:
            self._move_to(self._compute_at + event.seconds)
        elif event.seconds:
            self._compute_at = max(begin + event.seconds, host_begin + event.late_s)
            self._idle_s += self._compute_at - begin - event.seconds
        self._compute_s += event.seconds
        self._note(COMPUTE, begin, self._compute_at)

    def _host(self, host_s: float) -> None:
        self._host_at += host_s
        if self._serial:
            self._idle_s += host_s
            self._compute_at = self._host_at

    def _move_to(self, at_s: float) -> None:
        self._compute_at = at_s
        if self._serial:
            self._host_at = at_s

    def _start(self, stream: str, key: str, seconds: float, host_s: float) -> tuple[float, float]:
        self._host(host_s)
        if self._serial:
            begin = self._compute_at
            self._move_to(begin + seconds)
            self._expose(stream, seconds)
        else:
            begin = max(self._compute_at, self._host_at, self._stream_at.get(stream, 0.0))
        end = begin + seconds
        self._stream_at[stream] = end
        self._ends[key] = stream, 0.0, end
        self._busy_s[stream] = self._busy_s.get(stream, 0.0) + seconds
        self._note(stream, begin, end)
        return begin, end

    def _wait(self, key: str) -> None:
        stream, joined_s, end_s = self._ends.get(key, ("", 0.0, 0.0))
        if self._serial:
            self._note(COMPUTE, self._compute_at, self._compute_at, wait=True)
        else:
            self._wait_until(stream, joined_s, end_s)

    def _wait_until(self, stream: str, joined_s: float, end_s: float) -> None:
        """Wait for what began when other stages had come so far, and ended."""
        begin = self._compute_at
        if end_s > begin:
            late = max(begin, joined_s)
            self._stages_s += late - begin
            self._expose(stream, end_s - late)
            self._compute_at = end_s
        self._note(COMPUTE, begin, self._compute_at, wait=True)

    def _expose(self, stream: str, seconds: float) -> None:
        self._exposed_s[stream] = self._exposed_s.get(stream, 0.0) + seconds

    def _note(self, stream: str, begin: float, end: float, *, wait: bool = False) -> None:
        span = BusySpan(stream, begin - self._began_s, end - self._began_s, wait=wait)
        self._spans[self.at] = span

    # ------------------------------------------------------------------ other stages

    def _send(self, event: Send) -> None:
        number = self._calls[Send, event.key]
        self._calls[Send, event.key] += 1
        times = self._start(MESSAGES, event.key, event.seconds, event.host_s)
        self._board.sent[event.key, number] = times

    def _arrive(self, event: Arrival, begin_s: float, end_s: float) -> None:
        """Wait for a message: for its sender until it begins, and for the message from then on."""
        self._busy_s[MESSAGES] = self._busy_s.get(MESSAGES, 0.0) + event.seconds
        if not self._serial:
            self._wait_until(MESSAGES, begin_s, end_s)
            return
        begin = self._compute_at
        self._stages_s += max(0.0, end_s - begin)
        self._move_to(max(begin, end_s) + event.seconds)
        self._expose(MESSAGES, event.seconds)
        self._note(COMPUTE, begin, self._compute_at, wait=True)

    def _come_to(self, event: JointStart) -> None:
        number = self._calls[JointStart, event.key]
        self._calls[JointStart, event.key] += 1
        self._host(event.host_s)
        ready = max(self._compute_at, self._host_at, self._stream_at.get(event.stream, 0.0))
        self._board.joined[event.key, number].append(ready)
        self.moves += 1
        self._joining[event.stream] = event, number, self.at

    def _can_join(self, stream: str) -> bool:
        event, number, _ = self._joining[stream]
        return len(self._board.joined[event.key, number]) == event.members

    def _join(self, stream: str) -> None:
        """All ranks have come to the last collective of a stream, so its end is known."""
        event, number, place = self._joining.pop(stream)
        begin = max(self._board.joined[event.key, number])
        end = begin + event.seconds
        if self._serial:
            self._stages_s += begin - self._compute_at
            self._move_to(end)
            self._expose(stream, event.seconds)
        self._stream_at[stream] = end
        self._ends[event.key] = stream, begin, end
        self._busy_s[stream] = self._busy_s.get(stream, 0.0) + event.seconds
        self._spans[place] = BusySpan(stream, begin - self._began_s, end - self._began_s)
