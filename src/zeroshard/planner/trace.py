"""A plan as a trace for chrome://tracing and Perfetto: the events of a step, and the memory.

With the time of a step, events are in microseconds on the streams of the device. Without it each event
takes one tick of a logical clock (1 microsecond): only the order has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

from zeroshard.core.tiers import Tier
from zeroshard.planner.allocations import Held
from zeroshard.planner.plan import Plan
from zeroshard.planner.schedule import COMPUTE, BusySpan
from zeroshard.planner.step_log import Begun, Ended, Operation, StepEvent
from zeroshard.planner.step_time import stream_of


class _Shown(NamedTuple):
    """An event of a trace, in microseconds."""

    name: str
    phase: str
    span: BusySpan
    args: dict[str, Any]


def trace(plan: Plan) -> dict[str, Any]:
    """The trace as a JSON object. The plan must have been made with its events.

    On the compute stream a slice of each phase has the operations in it. With a time, each pipeline
    stage is a process; the memory is that of the rank of the plan. ``otherData`` has the numbers of the
    plan that the slices add up to.
    """
    own = plan.simulation.rank
    events: list[dict[str, Any]] = []
    if plan.time is None:
        shown, held = _logical(plan.simulation.events)
        events += _process(0, f"rank {own} of {plan.model}", shown)
    else:
        held = _held(plan.simulation.events, plan.time.spans)
        times = plan.stage_times or (plan.time,)
        ranks = [stage.rank for stage in plan.stages] or [own]
        for rank, time in zip(ranks, times, strict=True):
            pid = rank if plan.stages else 0
            events += _process(pid, f"rank {rank} of {plan.model}", list(_timed(time.spans)))
    pid = own if plan.time is not None and plan.stages else 0
    events += [_counter(pid, at, each) for at, each in held]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "seconds"
            if plan.time is not None
            else "one tick for each event: only the order has a meaning",
            "peak_nbytes": plan.simulation.peak_nbytes,
            "time": None if plan.time is None else plan.time.as_dict(),
        },
    }


def _process(pid: int, name: str, shown: Sequence[_Shown]) -> Iterator[dict[str, Any]]:
    """The streams of one rank, and what is on them."""
    streams = list(dict.fromkeys([COMPUTE, *(each.span.stream for each in shown)]))
    ids = {stream: at + 1 for at, stream in enumerate(streams)}
    yield _metadata(pid, "process_name", 0, name)
    for stream, number in ids.items():
        yield _metadata(pid, "thread_name", number, stream)
    for phase, begin, end in _phases(shown):
        yield _slice(pid, phase, COMPUTE, ids, begin, end)
    for each in shown:
        span = each.span
        yield _slice(pid, each.name, span.stream, ids, span.begin_s, span.end_s, each.args)


_TICK_S = 1e-6


def _logical(events: Sequence[StepEvent]) -> tuple[list[_Shown], list[tuple[float, Held]]]:
    """One tick for each operation, start of a collective, and wait for one."""
    shown: list[_Shown] = []
    held: list[tuple[float, Held]] = []
    phase = "forward"
    for event in events:
        now = len(shown) * _TICK_S
        if isinstance(event, Held):
            held.append((max(0.0, now - _TICK_S), event))  # that of the operation before
            continue
        stream = stream_of(event.op) if isinstance(event, Begun) else COMPUTE
        phase = event.phase if isinstance(event, Operation) else phase
        span = BusySpan(stream, now, now + _TICK_S, wait=isinstance(event, Ended))
        shown.append(_shown(event, phase, span))
    return shown, held


Spans: TypeAlias = Sequence[tuple[StepEvent | None, BusySpan]]


def _timed(spans: Spans) -> Iterator[_Shown]:
    """Events at their seconds; those without any, such as views, are left out."""
    phase = "forward"
    for event, span in spans:
        phase = event.phase if isinstance(event, Operation) else phase
        if span.end_s > span.begin_s:
            yield _shown(event, "step" if event is None else phase, span)


def _held(events: Sequence[StepEvent], spans: Spans) -> list[tuple[float, Held]]:
    """What the device holds, at the seconds of the operation before."""
    places = {id(event): span for event, span in spans if event is not None}
    held: list[tuple[float, Held]] = []
    now = 0.0
    for each in events:
        if isinstance(each, Held):
            held.append((now, each))
        elif isinstance(each, Operation) and (at := places.get(id(each))) is not None:
            now = at.begin_s
    return held


def _shown(event: StepEvent | None, phase: str, span: BusySpan) -> _Shown:
    if isinstance(event, Operation):
        work = event.work
        args = {"module": event.module, "kind": work.kind, "bytes": work.nbytes, "flop": work.flop}
        return _Shown(work.op, phase, span, args)
    if isinstance(event, Begun):
        return _Shown(event.key, phase, span, {"bytes": event.nbytes, "ranks": len(event.ranks)})
    if isinstance(event, Ended):
        return _Shown(f"wait for {event.key}", phase, span, {})
    return _Shown("wait for the update" if span.wait else "update", phase, span, {})


def _phases(shown: Sequence[_Shown]) -> Iterator[tuple[str, float, float]]:
    """Name, begin and end of each run of events of one phase on the compute stream."""
    on_compute = (each for each in shown if each.span.stream == COMPUTE)
    for name, run in groupby(on_compute, key=lambda each: each.phase):
        spans = [each.span for each in run]
        yield name, spans[0].begin_s, spans[-1].end_s


def _metadata(pid: int, name: str, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": thread, "name": name, "args": {"name": text}}


def _slice(
    pid: int,
    name: str,
    stream: str,
    ids: dict[str, int],
    begin_s: float,
    end_s: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": pid, "tid": ids[stream], "name": name, "cat": stream, "ts": 1e6 * begin_s,
        "dur": 1e6 * (end_s - begin_s), "args": args or {},
    }  # fmt: skip


def _counter(pid: int, at_s: float, held: Held) -> dict[str, Any]:
    """Bytes on the device: their areas in the trace add up to all."""
    device = {c: n for (c, tier), n in held.held.items() if tier == Tier.DEVICE.name}
    return {
        "ph": "C", "pid": pid, "tid": 0, "name": "device memory, bytes", "ts": 1e6 * at_s,
        "args": {**device, "others": held.activations_nbytes},
    }  # fmt: skip
