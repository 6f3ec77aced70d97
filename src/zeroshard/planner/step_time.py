"""The seconds of a step on a machine: its operations and collectives, priced and put on streams.

An operation takes as long as what limits it: FLOP at the rate of matrix products of its size, bytes at
the rate of memory, elements of slow functions and of random numbers at their rates. In addition the host
needs the same time for each. One core of a CPU computes a product at the rate of square matrices of its
smallest size, before or after it has moved the bytes; a GPU at the rate of its FLOP, while it moves them.
A collective takes the latency, and the bytes that a rank sends at the rate of its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from zeroshard.config.machine_file import MachineFile, Source, Values
from zeroshard.core.tiers import Tier
from zeroshard.planner.prices import Grown, Prices, Updated
from zeroshard.planner.schedule import (
    MESSAGES,
    Arrival,
    BusySpan,
    Compute,
    Event,
    Send,
    StageStep,
    Start,
    StreamWait,
    Timing,
    stretched,
    timing,
)
from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_log import MESSAGE, Begun, Ended, Operation, StepEvent

BANDS: Mapping[bool, float] = {True: 0.2, False: 0.4}
"""How far the total may be off, as a fraction: if every number was measured, and otherwise."""

NOT_MODELLED = (
    "the data loader, the learning-rate schedule, and what the program does between steps",
    "waits for a slower rank, other load, clocks that fall with heat",
    "that collectives take bandwidth and multiprocessors from computing; latency that grows with ranks",
    "fused and compiled kernels of a GPU: operations are those of eager torch on the CPU",
    "the overlap of an update in host memory or on disk with anything else",
    "reading parameters from host memory or disk at stage 3 (offload_param), and writing them back",
)
"""What a step time does not contain."""

NOT_MODELLED_OF_STAGES = (
    "of a pipeline: a message begins when it is sent, also if its receiver has not asked for it; on a "
    "device the host waits for the shapes of the first message of a step",
    "other ranks of a pipeline stage take as long as the one that was simulated",
)
"""What the time of a pipeline does not contain besides."""


_STREAMS = {
    "reduce_scatter": "reduce-scatter", "all_reduce": "reduce-scatter", MESSAGE: MESSAGES,
}  # fmt: skip
"""The stream of a collective; all others are on "all-gather"."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step of one rank.

    ``kinds``: seconds of compute by what limits it, without the update. ``update_s``: of the update, a
    part of compute or of "host update". ``samples`` and ``tokens``: of all ranks in a step; 0 tokens: not
    known. ``sources``: of the numbers that were used. ``spans``: of each event of the simulation that
    takes time when it runs, in order; the event of an update that is not on the device is None.
    ``stages``: of the pipeline. The time is then wall time, also on one processor: ranks wait for
    messages.
    """

    machine: str
    serial: bool
    timing: Timing
    update_s: float
    kinds: Mapping[str, float]
    samples: int
    tokens: int
    sources: Mapping[str, Source]
    spans: Sequence[tuple[StepEvent | None, BusySpan]] = ()
    stages: int = 1

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.timing.total_s

    @property
    def band(self) -> float:
        """How far the total may be off, as a fraction of it. See :data:`BANDS`."""
        return BANDS[all(source == "measured" for source in self.sources.values())]

    @property
    def not_measured(self) -> list[str]:
        """The numbers that were used and not measured, with their sources."""
        return [f"{key} ({s})" for key, s in sorted(self.sources.items()) if s != "measured"]

    def late_gathers(self) -> tuple[int, float]:
        """How many all-gathers begin only when they are needed, and for how long they are waited for."""
        count, seconds = 0, 0.0
        begun: set[str] = set()  # after the last operation
        for event, span in self.spans:
            if isinstance(event, Operation):
                begun.clear()
            elif isinstance(event, Begun) and event.op == "all_gather":
                begun.add(event.key)
            elif isinstance(event, Ended) and event.key in begun:
                count, seconds = count + 1, seconds + span.end_s - span.begin_s
        return count, seconds

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """What it does not contain."""
        return NOT_MODELLED + (NOT_MODELLED_OF_STAGES if self.stages > 1 else ())

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        total, half = self.total_s, self.band * self.total_s
        return {
            "machine": self.machine, "serial": self.serial, **asdict(self.timing),
            "communication_s": sum(self.timing.busy_s.values()),
            "all_exposed_s": sum(self.timing.exposed_s.values()),
            "update_s": self.update_s, "band_s": [total - half, total + half],
            "late_gathers": dict(zip(("calls", "exposed_s"), self.late_gathers(), strict=True)),
            "kinds_s": dict(self.kinds), "samples_per_s": self.samples / total,
            "tokens_per_s": self.tokens / total if self.tokens else None,
            "sources": dict(self.sources), "not_modelled": list(self.not_modelled),
        }  # fmt: skip


def stage_times(
    stages: Sequence[Simulation],
    machine: MachineFile,
    *,
    samples: int,
    tokens: int,
    micro_batches: int | None = None,
) -> list[StepTime]:
    """The seconds of a step that was simulated with its events: of one rank of each pipeline stage.

    Without a pipeline there is one. All have the same total: a step ends when that of the last stage
    does. ``micro_batches``: of the step; None: as many as were simulated. Another number is on a line: a
    step with one more is timed, and the difference added or taken away. Of a pipeline it needs the
    schedule 1F1B (:func:`_with_one_more`).

    Raises:
        UsageError: the machine file lacks a number that the step needs.
    """
    values = Values(machine)
    serial = machine.execution == "serial"

    def timed(chosen: Sequence[Simulation]) -> tuple[list[Prices], list[_Priced], list[_Timed]]:
        prices = [Prices(values, found.mesh.world_size) for found in chosen]
        every = _priced_stages(chosen, prices)
        return (
            prices,
            every,
            timing([[each for _, each in pairs] for pairs in every], serial=serial),
        )

    prices, every, found = timed(stages)
    taken = [own for own, _ in found]
    kinds: list[dict[str, float]] = [price.kinds_s for price in prices]
    added = 0 if micro_batches is None else micro_batches - _forwards(stages)
    if added:
        more, _, later = timed(list(map(_with_one_more, stages)))
        taken = [extended(own, after, added) for own, (after, _) in zip(taken, later, strict=True)]
        kinds = [_on(own, price.kinds_s, added) for own, price in zip(kinds, more, strict=True)]
    return [
        StepTime(
            machine.name, serial, own, price.update_s(stage.updated), of_kinds, samples, tokens,
            values.used, [(event, span) for (event, _), span in zip(pairs, spans, strict=True)],
            len(stages),
        )
        for stage, price, own, of_kinds, pairs, (_, spans) in zip(
            stages, prices, taken, kinds, every, found, strict=True
        )
    ]  # fmt: skip


def stage_seconds(
    stages: Sequence[Simulation],
    machine: MachineFile,
    *,
    micro_batches: int,
    grown: Sequence[Grown | None],
) -> float:
    """``stage_times(...)[0].total_s``, for a search that asks often. ``grown``: of each stage."""
    values = Values(machine)
    prices = [
        Prices(values, found.mesh.world_size, own) for found, own in zip(stages, grown, strict=True)
    ]

    def total_s(chosen: Sequence[Simulation]) -> float:
        every = _priced_stages(chosen, prices)
        events = [list(stretched(each for _, each in pairs)) for pairs in every]
        return timing(events, serial=machine.execution == "serial")[0][0].total_s

    once_s, added = total_s(stages), micro_batches - _forwards(stages)
    if not added:
        return once_s
    return once_s + added * (total_s(list(map(_with_one_more, stages))) - once_s)


def _forwards(stages: Sequence[Simulation]) -> int:
    """Forwards of a pipeline stage that were simulated, one for each micro-batch."""
    return len(stages[0].starts)


def _with_one_more(found: Simulation) -> Simulation:
    """A step with one more micro-batch: what is between two forwards of the steady part of 1F1B again.

    This is one forward and one backward on every rank, with as many messages. Without a pipeline it is
    the first micro-batch.
    """
    at = found.mesh.pipeline - 1 - found.mesh.coordinate(found.rank)["pipeline"]
    begin, end = found.starts[at : at + 2]
    events = found.events
    return replace(found, events=(*events[:end], *events[begin:]))


def extended(before: Timing, after: Timing, times: int) -> Timing:
    """``before``, and the difference to ``after`` as often as ``times``."""
    return Timing(
        before.total_s + times * (after.total_s - before.total_s),
        before.compute_s + times * (after.compute_s - before.compute_s),
        _on(before.busy_s, after.busy_s, times),
        _on(before.exposed_s, after.exposed_s, times),
        before.host_s + times * (after.host_s - before.host_s),
        before.stages_s + times * (after.stages_s - before.stages_s),
    )


def _on(before: Mapping[str, float], after: Mapping[str, float], times: int) -> dict[str, float]:
    keys = dict.fromkeys((*before, *after))
    first = {key: before.get(key, 0.0) for key in keys}
    return {key: max(0.0, first[key] + times * (after.get(key, 0.0) - first[key])) for key in keys}


def _priced(
    events: Sequence[StepEvent], updated: Updated, price: Prices
) -> Iterator[tuple[StepEvent | None, Event]]:
    """The events of a step with their seconds. Those of the update share its time by their bytes."""
    on_device = updated.tier == Tier.DEVICE.name or price.values.machine.execution == "serial"
    rate = _update_rate(events, updated, price) if on_device else 0.0
    away = not on_device
    operation_s = price.operation_s
    for event in events:
        if isinstance(event, Operation) and event.phase == "step":
            if away:
                yield from ((None, event) for event in _update_away(updated, price))
                away = False
            else:
                yield event, Compute(event.work.nbytes * rate, operation_s)
        elif isinstance(event, Operation):
            yield event, Compute(price.work_s(event.work), operation_s)
        elif isinstance(event, Begun):
            seconds = price.begun_s(event)
            stream = stream_of(event.op)
            yield event, Start(event.key, stream, seconds, operation_s)
        elif isinstance(event, Ended):
            yield event, StreamWait(event.key)


def _update_rate(events: Sequence[StepEvent], updated: Updated, price: Prices) -> float:
    """Seconds of the update on the device, for each byte of its operations."""
    update = [e.work for e in events if isinstance(e, Operation) and e.phase == "step"]
    whole = sum(work.nbytes for work in update)
    return price.update_s(updated) / whole if whole else 0.0


_Priced: TypeAlias = list[tuple[StepEvent | None, StageStep]]
_Timed: TypeAlias = tuple[Timing, Sequence[BusySpan]]
_NUMBER = re.compile(r"micro-batch \d+")


def _priced_stages(stages: Sequence[Simulation], prices: Sequence[Prices]) -> list[_Priced]:
    """The events of one rank of each pipeline stage with their seconds; of one rank, as it is alone."""
    every = list(zip(stages, prices, strict=True))
    if len(every) == 1:
        return [list(_priced(found.events, found.updated, price)) for found, price in every]
    shown = frozenset(found.rank for found in stages)
    return [list(_priced_stage(found, price, shown)) for found, price in every]


def _priced_stage(
    found: Simulation, price: Prices, shown: frozenset[int]
) -> Iterator[tuple[StepEvent | None, StageStep]]:
    """The events of one rank of a pipeline. ``shown``: the ranks that are looked at, one per stage.

    Messages of one kind between two stages arrive in the order in which they are sent.
    """
    messages: dict[str, tuple[bool, float]] = {}  # whether this rank receives it, and its seconds
    for event, priced in _priced(found.events, found.updated, price):
        if isinstance(event, Begun) and event.op == MESSAGE:
            assert isinstance(priced, Start)
            receives = event.ranks[1] == found.rank
            messages[event.key] = receives, priced.seconds
            if receives:
                yield event, Compute(0.0, priced.host_s)
            else:
                key = _NUMBER.sub("", event.key)
                yield event, Send(key, priced.seconds, priced.host_s)
        elif isinstance(event, Begun) and (members := len(shown.intersection(event.ranks))) > 1:
            assert isinstance(priced, Start)
            yield event, replace(priced, members=members)
        elif isinstance(event, Ended) and event.key in messages:
            receives, seconds = messages[event.key]
            key = _NUMBER.sub("", event.key)
            yield event, Arrival(key, seconds) if receives else StreamWait(key)
        else:
            yield event, priced


def stream_of(op: str) -> str:
    """The stream of a collective."""
    return _STREAMS.get(op, "all-gather")


def _update_away(updated: Updated, price: Prices) -> Iterator[Event]:
    """The update in host memory or on disk: copies there, update, copies back."""
    down, up = price.copies_s(updated)
    steps = [
        ("copies", down), ("host update", max(price.update_s(updated), price.disk_s(updated))),
        ("copies", up),
    ]  # fmt: skip
    for stream, seconds in steps:
        yield Start("update", stream, seconds)
        yield StreamWait("update")
