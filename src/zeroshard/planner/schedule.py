"""When the events of a step run: on the streams of a device or one after the other, on each rank.

Every rank has its events in the order in which the engine makes them. Of a pipeline one rank of each
stage is looked at. A rank stops where it needs a message that was not sent yet, or a collective that
another stage has not come to. So the bubble is not computed: it is what ranks wait.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

COMPUTE = "compute"
"""The name of the compute stream."""

MESSAGES = "messages"
"""The stream of messages between stages. What a rank sends goes one after the other."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of the compute stream. ``host_s``: that the host needs to start it.

    ``late_s``: of many works as one, from the moment at which the host begins until the compute stream
    ends, if that stream waits for nothing but the host; None: one work, which takes both one after the
    other.
    """

    seconds: float
    host_s: float = 0.0
    late_s: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Work of another stream, which starts when the compute stream and the host have come here.

    ``key``: the same for its :class:`StreamWait`, and in every step. ``members``: how many of the ranks
    that are looked at take part; it begins when all of them have come to it.
    """

    key: str
    stream: str
    seconds: float
    host_s: float = 0.0
    members: int = 1


@dataclass(frozen=True, slots=True)
class StreamWait:
    """The compute stream waits for what was started with this key last; for nothing if nothing was."""

    key: str


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


Event: TypeAlias = Compute | Start | StreamWait
StageStep: TypeAlias = Event | Send | Arrival

E = TypeVar("E")


def stretched(events: Iterable[E]) -> Iterator[E | Compute]:
    """The same events with all work between two others as one: equal times, fewer spans."""
    seconds = host_s = late_s = 0.0
    for event in events:
        if isinstance(event, Compute):
            host_s += event.host_s
            if event.seconds:
                seconds += event.seconds
                late_s = max(late_s, host_s) + event.seconds
            continue
        if host_s or seconds:
            yield Compute(seconds, host_s, late_s)
        seconds = host_s = late_s = 0.0
        yield event
    if host_s or seconds:
        yield Compute(seconds, host_s, late_s)


@dataclass(frozen=True)
class Timing:
    """Seconds of one step. ``total_s`` is the sum of compute, exposed, host and stages.

    ``busy_s``: of each stream besides compute. ``exposed_s``: of these, how long the compute stream
    waited. ``host_s``: how long it had nothing to do because the host had not started it yet; on one
    processor, what the host did. ``stages_s``: how long it waited until ranks of other pipeline stages
    had come as far.
    """

    total_s: float
    compute_s: float
    busy_s: Mapping[str, float]
    exposed_s: Mapping[str, float]
    host_s: float
    stages_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BusySpan:
    """When an event has its stream, in seconds since the step began. ``wait``: the stream waits."""

    stream: str
    begin_s: float
    end_s: float
    wait: bool = False


def timing(
    ranks: Sequence[Sequence[StageStep]], *, serial: bool
) -> list[tuple[Timing, Sequence[BusySpan]]]:
    """The second of two equal steps of each rank, and when each of its events runs, in their order.

    The second one waits for what the first one has started. Streams besides compute may end after the
    step. A step of all ranks ends when that of the last one does. ``serial``: one processor is the host
    and all streams. Otherwise the host runs ahead of the device, and waits for the compute stream at the
    end of a step.

    Raises:
        ValueError: the ranks wait for each other without end.
    """
    clocks = [_Rank(events, serial) for events in ranks]
    for _ in range(1 if serial else 2):  # on one processor nothing goes on after a step
        board = _Board()
        running = [clock.run(board) for clock in clocks]
        while running:
            before = board.moves
            running = [each for each in running if next(each, None) is not None]
            if running and before == board.moves:
                raise ValueError("the pipeline stages wait for each other without end")
        end = max(clock.now for clock in clocks)
        for clock in clocks:
            clock.end(end)
    return [(clock.timing, clock.done_spans) for clock in clocks]


@dataclass
class _Board:
    """What the ranks of a step know of each other, by key and number of the call in the step.

    ``moves``: what others may have waited for.
    """

    moves: int = 0
    sent: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)  # begin, end
    joined: defaultdict[tuple[str, int], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )


class _Rank:
    """Host, compute stream and other streams of one rank."""

    def __init__(self, events: Sequence[StageStep], serial: bool) -> None:
        self._events, self._serial = events, serial
        self._board = _Board()
        self.at = 0  # events of the step that have run
        self._began_s = self._host_at = self._compute_at = 0.0
        self._stream_at: dict[str, float] = {}
        # By key: stream, when other stages had come to it, and end.
        self._ends: dict[str, tuple[str, float, float]] = {}
        self._joining: dict[str, tuple[Start, int, int]] = {}  # by stream: number, place
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

    def _begin(self, board: _Board) -> None:
        self.at, self._board = 0, board
        self._calls.clear()
        self._compute_s = self._idle_s = self._stages_s = 0.0
        self._busy_s, self._exposed_s = {}, {}
        self._began_s, self._spans = self._compute_at, [None] * len(self._events)

    def end(self, at_s: float) -> None:
        """End the step when the last rank does."""
        self._idle_s += max(0.0, self._host_at - self._compute_at)
        self._stages_s += at_s - self.now
        self._host_at = self._compute_at = at_s

    def run(self, board: _Board) -> Iterator[bool]:
        """Run a step. Yields where another rank must go on first."""
        self._begin(board)
        while self.at < len(self._events):
            event = self._events[self.at]
            if isinstance(event, Compute):
                self._compute(event)
            elif isinstance(event, Arrival):
                yield from self._arrive(event)
            else:
                yield from self._after_its_stream(event)
            self.at += 1
            board.moves += 1
        for stream in list(self._joining):
            yield from self._join(stream)

    def _after_its_stream(self, event: Start | Send | StreamWait) -> Iterator[bool]:
        """Run an event when the collective that its stream is in has begun."""
        stream = self._stream_of(event)
        if stream in self._joining:
            yield from self._join(stream)
        if isinstance(event, Send):
            self._send(event)
        elif isinstance(event, StreamWait):
            self._wait(event.key)
        elif event.members == 1:
            self._start(event.stream, event.key, event.seconds, event.host_s)
        else:
            self._come_to(event)
            if self._serial:
                yield from self._join(event.stream)

    def _stream_of(self, event: Start | Send | StreamWait) -> str:
        """The stream whose last collective must have begun before the event can."""
        if isinstance(event, StreamWait):
            joining = self._joining.items()
            return next((s for s, (joint, _, _) in joining if joint.key == event.key), "")
        return event.stream if isinstance(event, Start) else MESSAGES

    # ------------------------------------------------------------------ work

    def _compute(self, event: Compute) -> None:
        begin, host_begin, seconds = self._compute_at, self._host_at, event.seconds
        self._host(event.host_s)
        if self._serial:
            self._move_to(self._compute_at + seconds)
        elif seconds:
            late_s = event.host_s + seconds if event.late_s is None else event.late_s
            self._compute_at = max(begin + seconds, host_begin + late_s)
            self._idle_s += self._compute_at - begin - seconds
        self._compute_s += seconds
        self._note(COMPUTE, self._compute_at - seconds, self._compute_at)

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

    def _arrive(self, event: Arrival) -> Iterator[bool]:
        """Wait for a message: for its sender until it begins, and for the message from then on."""
        key = event.key, self._calls[Arrival, event.key]
        while key not in self._board.sent:
            yield True
        self._calls[Arrival, event.key] += 1
        begin_s, end_s = self._board.sent[key]
        self._busy_s[MESSAGES] = self._busy_s.get(MESSAGES, 0.0) + event.seconds
        if not self._serial:
            self._wait_until(MESSAGES, begin_s, end_s)
            return
        begin = self._compute_at
        self._stages_s += max(0.0, end_s - begin)
        self._move_to(max(begin, end_s) + event.seconds)
        self._expose(MESSAGES, event.seconds)
        self._note(COMPUTE, begin, self._compute_at, wait=True)

    def _come_to(self, event: Start) -> None:
        number = self._calls[Start, event.key]
        self._calls[Start, event.key] += 1
        self._host(event.host_s)
        ready = max(self._compute_at, self._host_at, self._stream_at.get(event.stream, 0.0))
        self._board.joined[event.key, number].append(ready)
        self._board.moves += 1
        self._joining[event.stream] = event, number, self.at

    def _join(self, stream: str) -> Iterator[bool]:
        """When all ranks have come to the last collective of a stream, its end is known."""
        event, number, place = self._joining[stream]
        ready = self._board.joined[event.key, number]
        while len(ready) < event.members:
            yield True
        del self._joining[stream]
        begin = max(ready)
        end = begin + event.seconds
        if self._serial:
            self._stages_s += begin - self._compute_at
            self._move_to(end)
            self._expose(stream, event.seconds)
        self._stream_at[stream] = end
        self._ends[event.key] = stream, begin, end
        self._busy_s[stream] = self._busy_s.get(stream, 0.0) + event.seconds
        self._spans[place] = BusySpan(stream, begin - self._began_s, end - self._began_s)
