"""A machine of host threads, devices, streams, events and an allocator, without any values.

Every method is one event of the program. Operations of a stream begin after the operations before them,
and after all that the host thread had seen when it queued them. A block that is freed may be given out
again at once, to the next operation of the stream that it was allocated on.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from zeroshard_testing.streams.clocks import Clock, Timeline, merge
from zeroshard_testing.streams.findings import Finding, Site, here
from zeroshard_testing.streams.memory_blocks import MemoryBlock, Use

Range = tuple[MemoryBlock, int, int]
"""A block with the first byte that is used and the one after the last."""


def grows_segments() -> bool:
    """Whether the allocator's settings let segments grow. Torch reads them when it starts."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in os.environ.get(name, "") for name in names)


class HostThread(Timeline):
    """A host thread, its current device, its current stream on every device, and the locks it holds."""

    def __init__(self, number: int, name: str, *, is_main: bool) -> None:
        super().__init__(number, name)
        self.is_main = is_main
        self.device = 0
        self.has_device = is_main
        self.streams: dict[int, StreamLine] = {}
        self.pool = 0  # the number of the pool that it allocates from
        self.locks: Counter[int] = Counter()  # by number of the lock, how often it was acquired


class StreamLine(Timeline):
    """A stream of one device."""

    def __init__(self, number: int, name: str, device: int) -> None:
        super().__init__(number, name)
        self.device = device


@dataclass
class Counts:
    """What happened in one phase."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind and thread
    wait_sites: Counter[tuple[str, Site]] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    kernel_sites: Counter[tuple[str, Site]] = field(default_factory=Counter)
    read_nbytes: int = 0
    written_nbytes: int = 0
    allocations: int = 0
    allocated_nbytes: int = 0
    pageable: int = 0
    copies: Counter[str] = field(default_factory=Counter)  # by direction, in bytes
    # Bytes that collectives of NCCL read and wrote, by kind: in memory that NCCL knows, and in other.
    registered: Counter[str] = field(default_factory=Counter)
    unregistered: Counter[str] = field(default_factory=Counter)


DEVICE_NBYTES = 80 << 30
"""The memory of a pretended device, if no other size is given."""


class Machine:
    """``devices`` devices, each with ``device_nbytes`` of memory.

    ``query``: what ``Event.query`` answers; None: the truth as far as known.
    """

    def __init__(
        self, devices: int, query: bool | None, device_nbytes: int = DEVICE_NBYTES
    ) -> None:
        self.devices = devices
        self.query = query
        self.device_nbytes = device_nbytes
        self.findings: list[Finding] = []
        self.phases: dict[str, Counts] = {}
        self.phase = ""
        self.live_nbytes = [0] * devices
        self.peak_nbytes = [0] * devices
        self.live: set[MemoryBlock] = set()
        self.lock = threading.RLock()
        self._released = threading.Condition(self.lock)
        self._stuck: set[tuple[int, int]] = set()  # operations that do not end: timeline and tick
        self._seen: set[tuple[object, ...]] = set()
        self._numbers = 0
        self._local = threading.local()
        self._main = threading.main_thread()
        self.streams: list[StreamLine] = []
        self._stream_numbers: set[int] = set()
        self._defaults = [self.new_stream(device, "default stream") for device in range(devices)]

    # ------------------------------------------------------------------ timelines

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    @property
    def counts(self) -> Counts:
        """The counts of the phase that runs."""
        known = self.phases.get(self.phase)
        if known is None:
            known = self.phases[self.phase] = Counts()
        return known

    def thread(self) -> HostThread:
        """The calling host thread."""
        known: HostThread | None = getattr(self._local, "thread", None)
        if known is None:
            # Not current_thread(): for a thread that Python did not start it makes an object with an
            # event, and setting a followed event comes back here.
            ident = threading.get_ident()
            this = vars(threading)["_active"].get(ident)
            name = this.name if this is not None else f"thread {ident}"
            known = HostThread(self._number(), name, is_main=this is self._main)
            self._local.thread = known
        return known

    def name_thread(self, name: str) -> HostThread:
        """Make the timeline of a new thread, on that thread."""
        self._local.thread = thread = HostThread(self._number(), name, is_main=False)
        return thread

    def new_stream(self, device: int, name: str = "stream") -> StreamLine:
        """A new stream. Nothing orders it with others."""
        number = self._number()
        stream = StreamLine(number, f"{name} {number} of device {device}", device)
        self.streams.append(stream)
        self._stream_numbers.add(number)
        return stream

    def default_stream(self, device: int) -> StreamLine:
        """The stream that threads use on ``device`` if they choose no other."""
        return self._defaults[device]

    def current_stream(self, device: int) -> StreamLine:
        """The calling thread's stream on ``device``."""
        return self.thread().streams.get(device, self._defaults[device])

    # ------------------------------------------------------------------ findings

    def report(
        self, kind: str, text: str, other: Use | None = None, *, key: tuple[object, ...] = ()
    ) -> None:
        """Note a finding. One that differs only in its numbers is noted once."""
        where, theirs = here(), other.site if other is not None else ()
        key = (kind, where[:2], theirs[:2], key)
        if key not in self._seen:
            self._seen.add(key)
            self.findings.append(Finding(kind, text, where, theirs, self.phase))

    def _touches_cuda(self, what: str) -> None:
        thread = self.thread()
        if not thread.has_device:
            self.report(
                "thread",
                f"thread {thread.name!r} does {what} and has not called set_device: it would make "
                "a context on device 0",
            )

    # ------------------------------------------------------------------ memory

    def use(
        self, timeline: Timeline, what: str, reads: Sequence[Range], writes: Sequence[Range]
    ) -> Site:
        """Let an operation that begins now on ``timeline`` use memory. Returns where that is."""
        tick, site = timeline.tick(), here()
        locks = frozenset(timeline.locks) if isinstance(timeline, HostThread) else frozenset[int]()
        for ranges, is_write in ((reads, False), (writes, True)):
            for block, begin, end in ranges:
                if begin >= end:
                    continue
                for use in block.conflicts(timeline, begin, end, writes=is_write, locks=locks):
                    self.report(
                        "race",
                        f"{what} on {timeline} {'writes' if is_write else 'reads'} bytes {begin} to "
                        f"{end} of {block}; {use.what} on {use.timeline} "
                        f"{'writes' if use.writes else 'reads'} bytes {use.begin} to {use.end}",
                        use,
                    )
                block.add(Use(timeline, tick, begin, end, is_write, what, site, locks))
        return site

    def host(self, what: str, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        """The calling thread uses host memory."""
        self.use(self.thread(), what, reads, writes)

    def kernel(
        self,
        device: int,
        what: str,
        reads: Sequence[Range],
        writes: Sequence[Range],
        *,
        stream: StreamLine | None = None,
        traffic: tuple[int, int] = (0, 0),
    ) -> StreamLine:
        """Queue a kernel or a copy on ``stream``, by default the current one of ``device``."""
        self._touches_cuda(what)
        line = stream or self.current_stream(device)
        line.join(self.thread().clock)
        site = self.use(line, what, reads, writes)
        counts = self.counts
        counts.kernels[what] += 1
        counts.kernel_sites[what, site] += 1
        counts.read_nbytes += traffic[0]
        counts.written_nbytes += traffic[1]
        return line

    def allocate(self, block: MemoryBlock) -> None:
        """Give out a block. It may be the block that the stream freed last, with work still queued.

        Raises:
            torch.OutOfMemoryError: the device has less memory.
            RuntimeError: segments can grow, so a pool with an allocator of its own has none.
        """
        assert block.device is not None
        if self.live_nbytes[block.device] + block.nbytes > self.device_nbytes:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {block.nbytes} bytes. GPU {block.device} has "
                f"a total capacity of {self.device_nbytes} bytes."
            )
        self._touches_cuda("an allocation")
        block.pool = self.thread().pool
        if block.pool and grows_segments():
            raise RuntimeError("torch.cuda.MemPool doesn't currently support expandable_segments.")
        line = self.current_stream(block.device)
        block.home = line
        if line.ticks:
            block.uses = [
                Use(
                    line,
                    line.ticks,
                    0,
                    block.nbytes,
                    True,
                    "work of the block's last owner",
                    here(),
                )
            ]
        self.live.add(block)
        self.live_nbytes[block.device] += block.nbytes
        self.peak_nbytes[block.device] = max(
            self.peak_nbytes[block.device], self.live_nbytes[block.device]
        )
        counts = self.counts
        counts.allocations += 1
        counts.allocated_nbytes += block.nbytes

    def free(self, block: MemoryBlock, by: Clock) -> None:
        """Take a block back. ``by``: the clock of the thread that frees it."""
        if block.device is None or block not in self.live:
            return
        self.live.remove(block)
        self.live_nbytes[block.device] -= block.nbytes
        assert block.home is not None
        after = dict(by)
        merge(after, block.home.clock)
        for stream in block.recorded:
            merge(after, stream.clock)
        for use in block.unordered(after):
            self.report(
                "reuse",
                f"{block} is freed and can be given out again on {block.home}, while {use.what} on "
                f"{use.timeline} may not have ended",
                use,
            )

    def record_stream(self, block: MemoryBlock, stream: StreamLine) -> None:
        """Let ``block``, once it is freed, wait for all that ``stream`` has to do by then."""
        block.recorded.add(stream)

    def pin(self, block: MemoryBlock) -> None:
        """Page-lock a mapping."""
        self._touches_cuda("page-locking")
        block.is_pinned = True

    def unpin(self, block: MemoryBlock) -> None:
        """End page-locking. No copy may be in flight."""
        self._touches_cuda("the end of page-locking")
        block.is_pinned = False
        for use in block.unordered(self.thread().clock):
            if isinstance(use.timeline, StreamLine):
                self.report(
                    "unpin",
                    f"page-locking of {block} ends while {use.what} on {use.timeline} may be in flight",
                    use,
                )

    # ------------------------------------------------------------------ order

    def record(self, stream: StreamLine) -> Clock:
        """The clock of an event that is recorded on ``stream`` now."""
        self._touches_cuda("the record of an event")
        stream.join(self.thread().clock)
        return dict(stream.clock)

    def stream_waits(self, stream: StreamLine, clock: Mapping[int, int]) -> None:
        """Let later work of ``stream`` begin after what ``clock`` knows."""
        self._touches_cuda("a wait of a stream")
        stream.join(clock)

    def hang(self, stream: StreamLine) -> tuple[int, int]:
        """Let the newest operation of ``stream`` not end before :meth:`release` gets what this returns.

        A thread that waits for it, or for what comes after it, blocks. Streams go on in the model, since
        what they compute is known already.
        """
        stuck = stream.number, stream.clock[stream.number]
        self._stuck.add(stuck)
        return stuck

    def release(self, stuck: tuple[int, int]) -> None:
        """End an operation that hangs."""
        with self.lock:
            self._stuck.discard(stuck)
            self._released.notify_all()

    def _hangs(self, clock: Mapping[int, int]) -> bool:
        """Whether ``clock`` knows an operation that does not end."""
        return any(clock.get(number, 0) >= tick for number, tick in self._stuck)

    def host_waits(self, kind: str, clock: Mapping[int, int]) -> None:
        """Block the calling thread until what ``clock`` knows has ended. Counted if it was not known."""
        self._touches_cuda(f"a wait ({kind})")
        while self._hangs(clock):
            self._released.wait()
        thread = self.thread()
        if not self._is_known(thread, clock):
            counts = self.counts
            counts.waits[kind, "main" if thread.is_main else thread.name] += 1
            counts.wait_sites[kind, here()] += 1
        thread.join(clock)

    def _is_known(self, thread: HostThread, clock: Mapping[int, int]) -> bool:
        """Whether the thread has seen all operations of streams that ``clock`` knows."""
        mine, streams = thread.clock, self._stream_numbers
        return all(mine.get(n, 0) >= tick for n, tick in clock.items() if n in streams)

    def has_ended(self, clock: Mapping[int, int]) -> bool:
        """The answer of ``query``. A yes tells the calling thread that the work has ended."""
        self._touches_cuda("a query")
        thread = self.thread()
        answer = self._is_known(thread, clock) if self.query is None else self.query
        answer = answer and not self._hangs(clock)
        if answer:
            thread.join(clock)
        return answer

    def device_clock(self, device: int) -> Clock:
        """All work that was queued on ``device``."""
        clock: Clock = {}
        for stream in self.streams:
            if stream.device == device:
                merge(clock, stream.clock)
        return clock

    @contextmanager
    def on_stream(self, stream: StreamLine) -> Iterator[None]:
        """A context in which ``stream`` is current on its device, and its device on this thread."""
        self._touches_cuda("the entry of a stream")
        thread = self.thread()
        device, before = thread.device, thread.streams.get(stream.device)
        thread.device, thread.streams[stream.device] = stream.device, stream
        try:
            yield
        finally:
            thread.device = device
            if before is None:
                thread.streams.pop(stream.device, None)
            else:
                thread.streams[stream.device] = before
