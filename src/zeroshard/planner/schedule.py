"""When operations and collectives of a step run, on the streams of a device or one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of the compute stream. ``host_s``: that the host needs to start it."""

    seconds: float
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """Work of the compute stream between two other events: many :class:`Compute` as one.

    ``seconds`` and ``host_s``: sums. ``late_s``: from the moment at which the host begins until the
    compute stream ends, if that stream waits for nothing but the host.
    """

    seconds: float
    host_s: float
    late_s: float


@dataclass(frozen=True, slots=True)
class Start:
    """Work of another stream, which starts when the compute stream and the host have come here.

    ``key``: the same for its :class:`StreamWait`, and in every step.
    """

    key: str
    stream: str
    seconds: float
    host_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamWait:
    """The compute stream waits for what was started with this key last; for nothing if nothing was."""

    key: str


Event: TypeAlias = Compute | Stretch | Start | StreamWait


E = TypeVar("E")


def stretched(events: Iterable[E]) -> Iterator[E | Stretch]:
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
            yield Stretch(seconds, host_s, late_s)
        seconds = host_s = late_s = 0.0
        yield event
    if host_s or seconds:
        yield Stretch(seconds, host_s, late_s)


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


COMPUTE = "compute"
"""The name of the compute stream."""


def timing(events: Sequence[Event], *, serial: bool) -> tuple[Timing, Sequence[BusySpan]]:
    """The second of two equal steps: it waits for what the first one has started.

    Also when each event runs, in their order. Streams besides compute may end after the step.

    ``serial``: one processor is the host and all streams. Otherwise the host runs ahead of the device,
    and waits for the compute stream at the end of a step.
    """
    if serial:
        return _serial(events)
    clock = _Clock()
    clock.run(events)
    clock.reset()
    clock.run(events)
    total_s = clock.compute_at - clock.began_at
    found = Timing(total_s, clock.compute_s, clock.busy_s, clock.exposed_s, clock.idle_s)
    return found, clock.spans


def _serial(events: Iterable[Event]) -> tuple[Timing, Sequence[BusySpan]]:
    compute_s = host_s = now = 0.0
    busy_s: dict[str, float] = {}
    spans = []
    for event in events:
        if isinstance(event, StreamWait):
            spans.append(BusySpan(COMPUTE, now, now, wait=True))
            continue
        host_s += event.host_s
        begin = now + event.host_s
        now = begin + event.seconds
        stream = event.stream if isinstance(event, Start) else COMPUTE
        spans.append(BusySpan(stream, begin, now))
        if isinstance(event, Start):
            busy_s[event.stream] = busy_s.get(event.stream, 0.0) + event.seconds
        else:
            compute_s += event.seconds
    total_s = compute_s + host_s + sum(busy_s.values())
    return Timing(total_s, compute_s, busy_s, busy_s, host_s), spans


@dataclass
class _Clock:
    """Where host, compute stream and other streams are, in seconds."""

    began_at: float = 0.0  # of the step
    host_at: float = 0.0
    compute_at: float = 0.0
    stream_at: dict[str, float] = field(default_factory=dict)
    ends: dict[str, tuple[str, float]] = field(default_factory=dict)  # stream and end, by key
    compute_s: float = 0.0
    idle_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    exposed_s: dict[str, float] = field(default_factory=dict)
    spans: list[BusySpan] = field(default_factory=list)

    def reset(self) -> None:
        """Count the next step only."""
        self.compute_s = self.idle_s = 0.0
        self.busy_s, self.exposed_s = {}, {}
        self.began_at, self.spans = self.compute_at, []

    def run(self, events: Iterable[Event]) -> None:
        """Run one step."""
        for event in events:
            if isinstance(event, StreamWait):
                self._wait(event.key)
                continue
            if isinstance(event, Stretch):
                self._stretch(event)
                continue
            self.host_at += event.host_s
            if isinstance(event, Start):
                self._start(event)
                continue
            begin = self.compute_at
            if event.seconds:
                self.idle_s += max(0.0, self.host_at - self.compute_at)
                begin = max(self.compute_at, self.host_at)
                self.compute_at = begin + event.seconds
                self.compute_s += event.seconds
            self._note(COMPUTE, begin, self.compute_at)
        self.idle_s += max(0.0, self.host_at - self.compute_at)
        self.host_at = self.compute_at = max(self.host_at, self.compute_at)

    def _stretch(self, event: Stretch) -> None:
        begin, host_begin = self.compute_at, self.host_at
        self.host_at += event.host_s
        if event.seconds:
            self.compute_at = max(begin + event.seconds, host_begin + event.late_s)
            self.compute_s += event.seconds
            self.idle_s += self.compute_at - begin - event.seconds
        self._note(COMPUTE, begin, self.compute_at)

    def _start(self, event: Start) -> None:
        begin = max(self.compute_at, self.host_at, self.stream_at.get(event.stream, 0.0))
        end = begin + event.seconds
        self.stream_at[event.stream] = end
        self.ends[event.key] = event.stream, end
        self.busy_s[event.stream] = self.busy_s.get(event.stream, 0.0) + event.seconds
        self._note(event.stream, begin, end)

    def _note(self, stream: str, begin: float, end: float, *, wait: bool = False) -> None:
        self.spans.append(BusySpan(stream, begin - self.began_at, end - self.began_at, wait))

    def _wait(self, key: str) -> None:
        stream, end = self.ends.get(key, ("", 0.0))
        self._note(COMPUTE, self.compute_at, max(self.compute_at, end), wait=True)
        if end > self.compute_at:
            self.exposed_s[stream] = self.exposed_s.get(stream, 0.0) + end - self.compute_at
            self.compute_at = end
