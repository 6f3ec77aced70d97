"""A plan as a trace for chrome://tracing and Perfetto: the events of a step, and the memory.

With the time of a step, events are in microseconds on the streams of the device. Without it each event
takes one tick of a logical clock (1 microsecond): only the order has a meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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

    On the compute stream a slice of each phase has the operations in it. ``otherData`` has the numbers
    of the plan that the slices add up to.
    """
    timed = plan.time is not None
    shown, held = _timed(plan) if timed else _logical(plan.simulation.events)
    streams = list(dict.fromkeys([COMPUTE, *(each.span.stream for each in shown)]))
    ids = {stream: at + 1 for at, stream in enumerate(streams)}
    events: list[dict[str, Any]] = [
        _metadata("process_name", 0, f"rank {plan.simulation.rank} of {plan.model}"),
        *(_metadata("thread_name", number, stream) for stream, number in ids.items()),
        *(_slice(name, COMPUTE, ids, begin, end) for name, begin, end in _phases(shown)),
        *(
            _slice(each.name, each.span.stream, ids, each.span.begin_s, each.span.end_s, each.args)
            for each in shown
        ),
        *(_counter(at, each) for at, each in held),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "clock": "seconds"
            if timed
            else "one tick for each event: only the order has a meaning",
            "peak_nbytes": plan.simulation.peak_nbytes,
            "time": None if plan.time is None else plan.time.as_dict(),
        },
    }


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


def _timed(plan: Plan) -> tuple[list[_Shown], list[tuple[float, Held]]]:
    """Events at their seconds; those without any, such as views, are left out."""
    assert plan.time is not None
    spans = {id(event): span for event, span in plan.time.spans if event is not None}
    shown: list[_Shown] = []
    phase = "forward"
    for event, span in plan.time.spans:
        phase = event.phase if isinstance(event, Operation) else phase
        if span.end_s > span.begin_s:
            shown.append(_shown(event, "step" if event is None else phase, span))
    held: list[tuple[float, Held]] = []
    now = 0.0
    for each in plan.simulation.events:
        if isinstance(each, Held):
            held.append((now, each))
        elif isinstance(each, Operation) and (at := spans.get(id(each))) is not None:
            now = at.begin_s
    return shown, held


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
    name, begin, end = "", 0.0, 0.0
    for each in shown:
        if each.span.stream != COMPUTE:
            continue
        if each.phase != name:
            if name:
                yield name, begin, end
            name, begin = each.phase, each.span.begin_s
        end = each.span.end_s
    if name:
        yield name, begin, end


def _metadata(name: str, thread: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": thread, "name": name, "args": {"name": text}}


def _slice(
    name: str,
    stream: str,
    ids: dict[str, int],
    begin_s: float,
    end_s: float,
    args: dict[str, Any] | None = None,
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 0, "tid": ids[stream], "name": name, "cat": stream, "ts": 1e6 * begin_s,
        "dur": 1e6 * (end_s - begin_s), "args": args or {},
    }  # fmt: skip


def _counter(at_s: float, held: Held) -> dict[str, Any]:
    """Bytes on the device: their areas in the trace add up to all."""
    device = {c: n for (c, tier), n in held.held.items() if tier == Tier.DEVICE.name}
    return {
        "ph": "C", "pid": 0, "tid": 0, "name": "device memory, bytes", "ts": 1e6 * at_s,
        "args": {**device, "others": held.activations_nbytes},
    }  # fmt: skip
