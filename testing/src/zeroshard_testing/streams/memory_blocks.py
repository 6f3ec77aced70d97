"""Blocks of memory and their last uses. Two uses conflict if one writes and neither comes first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from zeroshard_testing.streams.clocks import Clock, Timeline
from zeroshard_testing.streams.findings import Site, line_of


@dataclass(frozen=True, slots=True)
class Use:
    """One operation that reads or writes the bytes from ``begin`` to ``end`` of a block.

    ``locks``: those that the host thread holds; none for a stream, which does the work later.
    """

    timeline: Timeline
    tick: int
    begin: int
    end: int
    writes: bool
    what: str
    site: Site
    locks: frozenset[int] = frozenset()

    def precedes(self, clock: Clock) -> bool:
        """Whether it has ended before anything that begins with ``clock``."""
        return clock.get(self.timeline.number, 0) >= self.tick


@dataclass(eq=False)
class MemoryBlock:
    """Memory of one storage, or of one page-locked mapping.

    ``device``: its device's number; None: host memory. ``home``: the stream that it was allocated on.
    ``is_cached``: pinned memory of torch, which it frees only when the copies from and to it have ended.
    """

    device: int | None
    nbytes: int
    home: Timeline | None = None
    is_pinned: bool = False
    is_cached: bool = False
    address: int = 0
    pool: int = 0  # the number of the ``MemPool`` that it is in; 0: none
    made_by: Site = ()
    uses: list[Use] = field(default_factory=list)
    recorded: set[Timeline] = field(default_factory=set)  # of record_stream

    def __str__(self) -> str:
        place = "host memory" if self.device is None else f"memory of device {self.device}"
        return f"{self.nbytes} bytes of {place}" + f" from {line_of(self.made_by)}"

    def conflicts(
        self,
        timeline: Timeline,
        begin: int,
        end: int,
        *,
        writes: bool,
        locks: frozenset[int] = frozenset(),
    ) -> Iterator[Use]:
        """The known uses that conflict with a use that begins now on ``timeline``, under ``locks``."""
        clock = timeline.clock
        for use in self.uses:
            if (
                (writes or use.writes)
                and use.begin < end
                and begin < use.end
                and not use.precedes(clock)
                and not (locks and locks & use.locks)  # one lock: never at the same time
            ):
                yield use

    def add(self, new: Use) -> None:
        """Remember a use, and forget earlier ones that can only conflict if it conflicts too."""
        clock = new.timeline.clock
        self.uses = [use for use in self.uses if not _is_implied(use, new, clock)]
        self.uses.append(new)

    def unordered(self, clock: Clock) -> Iterator[Use]:
        """The uses that may not have ended before what begins with ``clock``."""
        return (use for use in self.uses if not use.precedes(clock))


def _is_implied(old: Use, new: Use, clock: Clock) -> bool:
    if old.begin < new.begin or old.end > new.end:
        return False
    if not new.locks <= old.locks:  # a later use under these locks conflicts with the old one only
        return False
    if new.writes:
        return old.precedes(clock)
    return not old.writes and old.timeline is new.timeline
