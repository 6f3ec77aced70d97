"""How a simulated step grows with the micro-batch, and what the model alone takes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_log import (
    MESSAGE,
    Begun,
    Ended,
    Operation,
    StepEvent,
    is_of_layers,
)
from zeroshard.planner.work import Work, along

LOW, HIGH = 2, 3
"""Samples of the micro-batches between which lines are drawn. With one sample some operations differ."""


@dataclass(frozen=True)
class Growth:
    """How a step grows with each sample of the micro-batch. By phase: bytes; by operation: work.

    ``layers``: by the bytes of a collective of layers or of a message between pipeline stages with
    ``LOW`` samples, those with ``HIGH``.
    """

    phases: Mapping[str, int]
    works: Mapping[Work, Work]
    layers: Mapping[int, int]

    @classmethod
    def between(cls, low: Simulation, high: Simulation) -> Growth:
        """From the same kind with ``LOW`` and ``HIGH`` samples."""
        before, after = _works(low.events), _works(high.events)
        same = [w.op for w in before] == [w.op for w in after]
        pairs = zip(before, after, strict=True) if same else ()
        return cls(
            {
                name: moment.device_nbytes - low.moments[name].device_nbytes
                for name, moment in high.moments.items()
            },
            dict(pairs) if same else {work: _grown(work) for work in before},
            _grown_layers(low.events, high.events),
        )

    def at(self, size: int) -> _GrownStep:
        """A step with ``size`` samples."""
        return _GrownStep(self, (size - LOW) / (HIGH - LOW))


@dataclass(frozen=True)
class _GrownStep:
    """What a step with ``LOW`` samples does with another number. ``part``: 0 with LOW, 1 with HIGH."""

    growth: Growth
    part: float

    def work(self, low: Work) -> Work:
        """An operation."""
        high = self.growth.works.get(low)
        return low if high is None else along(low, high, self.part)

    def nbytes(self, begun: Begun) -> int:
        """A collective."""
        low = begun.nbytes
        if not _grows(begun):
            return low
        return max(0, round(low + self.part * (self.growth.layers.get(low, low) - low)))


def _grown(work: Work) -> Work:
    """``HIGH`` samples instead of ``LOW``, if all of an operation grows with them."""
    nothing = Work(work.op, work.kind, 0, work.dtype, 0, 0, 0, 0)
    return along(nothing, work, HIGH / LOW)


def _grown_layers(low: Sequence[StepEvent], high: Sequence[StepEvent]) -> dict[int, int]:
    before, after = (
        [e.nbytes for e in events if isinstance(e, Begun) and _grows(e)] for events in (low, high)
    )
    if len(before) != len(after):  # other operations: all of it grows
        return {nbytes: nbytes * HIGH // LOW for nbytes in before}
    return dict(zip(before, after, strict=True))


def _grows(begun: Begun) -> bool:
    return begun.op == MESSAGE or is_of_layers(begun.key)


def _works(events: Sequence[StepEvent]) -> list[Work]:
    return [e.work for e in events if isinstance(e, Operation) and e.phase != "step"]


def without_engine(found: Simulation, *, with_update: bool) -> Simulation:
    """A step without collectives of the engine, and without its update if that is not wanted.

    Collectives that layers call stay, and so do messages between pipeline stages.
    """
    kept: list[StepEvent] = []
    starts = []
    messages = {e.key for e in found.events if isinstance(e, Begun) and e.op == MESSAGE}
    for at, event in enumerate(found.events):
        if at in found.starts:
            starts.append(len(kept))
        if isinstance(event, Operation):
            if event.phase != "step" or with_update:
                kept.append(event)
        elif isinstance(event, (Begun, Ended)) and (
            is_of_layers(event.key) or event.key in messages
        ):
            kept.append(event)
    return replace(found, events=tuple(kept), starts=tuple(starts))
