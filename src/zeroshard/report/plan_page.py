"""Puts the page of a plan together, from what ``zeroshard plan --json`` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zeroshard.core.texts import GIB, gib, gib_text
from zeroshard.report.figures import ROWS, Figure, area_chart, bar_chart, render

MAX_UNITS = 10
"""Units in the figure of traffic: those that move the most."""
MAX_ROWS = 2000
"""Rows of the table of traffic."""


def plan_page(plan: Mapping[str, Any], config: Sequence[tuple[str, str, str]]) -> str:
    """The page of a plan as one HTML text without scripts, which loads nothing.

    ``plan``: :meth:`zeroshard.planner.plan.Plan.as_dict`. ``config``: key, value and origin of
    every key, :attr:`zeroshard.planner.plan.Plan.config`.

    Raises:
        UsageError: matplotlib is missing.
    """
    figures = [_phases(plan), _timeline(plan), _traffic(plan)]
    if plan["time"] is not None:
        figures.append(_time(plan["time"]))
    return render(
        "plan.html.j2",
        f"Plan of {plan['model']}",
        verdict=verdict(plan),
        changes=[_change(row) for row in plan["changes"] or ()],
        facts=list(_facts(plan)),
        peak=list(_peak(plan)),
        largest=[_largest(row) for row in plan["largest"]],
        figures=figures,
        states=[_state(row) for row in plan["memory"]],
        assumed=plan["assumed"],
        not_modelled=[*plan["not_modelled"], *_not_modelled_of_time(plan["time"])],
        given=[row for row in config if row[2] != "default"],
        defaults=[row for row in config if row[2] == "default"],
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """Whether the run fits, by how much, on which rank."""
    peak = f"peak {gib_text(plan['peak_nbytes'])} in {plan['peak_phase']} on rank {plan['rank']}"
    spare, limit = plan["spare_nbytes"], plan["limit_nbytes"]
    if limit is None:
        return f"{peak}; no memory of a device was given, so nothing to compare with"
    if plan["fits"]:
        return f"fits, {gib_text(spare)} to spare of {gib_text(limit)}; {peak}"
    return f"does not fit: {gib_text(-spare)} too much for {gib_text(limit)}; {peak}"


def _change(row: Mapping[str, Any]) -> tuple[str, ...]:
    how = "predicted" if row["predicted"] else "assumed"
    slower = f"{row['slowdown']:+.0%} ({how})"
    return row["text"], row["line"], gib_text(row["peak_nbytes"]), slower


def _facts(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{plan['parameters']:,}"
    yield "ranks", f"{plan['ranks']:,} ({plan['mesh']})"
    yield "ZeRO stage", str(plan["stage"])
    yield "micro-batch", str(plan["micro_batch"])
    yield "operations of", plan["target"]
    yield "state at rest", f"{gib_text(plan['states_nbytes'])} on the device of each rank"
    for number, stage in enumerate(plan["pipeline_stages"]):
        text = (
            f"rank {stage['rank']}: {stage['parameters']:,} parameters, peak "
            f"{gib_text(stage['peak_nbytes'])}, {stage['in_flight']} micro-batches in flight"
        )
        if "waits_s" in stage:
            text += f"; computes {_s(stage['compute_s'])} of a step, waits {_s(stage['waits_s'])}"
        yield f"pipeline stage {number}", text
    if (needs := plan["checkpoint"]) is not None:
        host = max(needs["write_nbytes"] + needs["copy_nbytes"], needs["read_nbytes"])
        text = f"{gib_text(sum(needs['files'].values()))} in {len(needs['files'])} file(s) of this rank"
        yield "checkpoint", f"{text}; at most {gib_text(host)} of host memory to save or load it"
    if (disk := plan["disk"])["file_nbytes"]:
        step = (
            f"reads {gib_text(disk['read_nbytes'])} and writes {gib_text(disk['written_nbytes'])}"
        )
        yield "disk", f"{gib_text(disk['file_nbytes'])} of files; a step {step}"
    if plan["one_more_nbytes"] is not None:
        yield "one more sample", f"needs {gib_text(plan['one_more_nbytes'])}, which does not fit"
    if plan["time"] is None:
        yield "time of a step", "not planned: no machine was given"
        return
    time = plan["time"]
    low, high = time["band_s"]
    tokens = time["tokens_per_s"]
    band = f"{_s(time['total_s'])} ({_s(low)} to {_s(high)})"
    yield f"time of a step on {time['machine']}", band
    rate = f"{time['samples_per_s']:,.1f} samples/s"
    yield "rate", rate + (f", {tokens:,.0f} tokens/s" if tokens else "")


def _peak(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    peak = plan["step_peak"]
    yield "phase", peak["phase"]
    yield "operation", peak["op"]
    yield from ((name, peak[name]) for name in ("module", "unit", "line") if peak[name])


def _largest(row: Mapping[str, Any]) -> tuple[str, ...]:
    shape = f"{row['dtype']} {list(row['shape'])}"
    return gib(row["nbytes"]), row["op"], shape, row["phase"], row["module"], row["line"]


def _state(row: Mapping[str, Any]) -> tuple[str, ...]:
    planned = "" if row["planned"] is None else gib(row["planned"])
    return row["category"], row["tier"], planned, gib(row["measured"])


def _phases(plan: Mapping[str, Any]) -> Figure:
    """Bytes by category, tier and phase. The figure has those of the device."""
    phases = plan["phases"]
    bars: dict[str, dict[str, float]] = {}
    cells: dict[tuple[str, str], dict[str, int]] = {}
    for phase, moment in phases.items():
        for row in moment["held"]:
            cells.setdefault((row["category"], row["tier"]), {})[phase] = row["nbytes"]
        cells.setdefault(("others", "device"), {})[phase] = moment["activations_nbytes"]
        cells.setdefault(("all", "device"), {})[phase] = moment["device_nbytes"]
        bars[phase] = {"device": moment["device_nbytes"] / GIB}
    for key in (("others", "device"), ("all", "device")):  # at the end
        cells[key] = cells.pop(key, {})
    cells["interpreter, torch", "host"] = dict.fromkeys(phases, plan["process_nbytes"])
    return Figure(
        "Peak of each phase",
        bar_chart(bars, "GiB on the device"),
        ("category, GiB", "tier", *phases),
        [(*key, *(gib(row.get(phase, 0)) for phase in phases)) for key, row in cells.items()],
        '"init" is everything before the first step; "save" and "load" are those of a checkpoint after '
        'the step. "others" are activations, temporaries of '
        "operations, and gradients before they are in a buffer.",
    )


def _timeline(plan: Mapping[str, Any]) -> Figure:
    line, limit = plan["timeline"], plan["limit_nbytes"]
    areas = {name: [n / GIB for n in row] for name, row in line["held"].items()}
    areas["others"] = [n / GIB for n in line["others"]]
    whole = line["device_nbytes"]
    kept = _every(len(whole), whole)
    names = [*line["held"], *line["away"]]
    columns = [*line["held"].values(), *line["away"].values()]
    return Figure(
        "Memory over a step",
        area_chart(
            areas, list(_spans(line["phase"])), "GiB on the device",
            limit=None if limit is None else limit / GIB,
            mark=whole.index(max(whole)) if whole else None,
        ),
        ("allocation", "phase", "device, GiB", "others", *names),
        [
            (
                f"{line['allocation'][at]:,}", line["phase"][at], gib(whole[at]),
                gib(line["others"][at]), *(gib(row[at]) for row in columns),
            )
            for at in kept
        ],
        "From left to right the allocations of a step, after the first one. Of consecutive allocations "
        "the highest is shown. Dashed: the limit, if it is below twice the peak.",
    )  # fmt: skip


def _every(count: int, values: Sequence[int]) -> list[int]:
    """At most about ``ROWS`` of the moments, the highest of each run among them."""
    size = max(1, -(-count // ROWS))
    runs = (range(at, min(at + size, count)) for at in range(0, count, size))
    return [max(run, key=values.__getitem__) for run in runs]


def _spans(phases: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    begin = 0
    for at, phase in enumerate(phases):
        if at + 1 == len(phases) or phases[at + 1] != phase:
            yield phase, begin, at
            begin = at + 1


def _traffic(plan: Mapping[str, Any]) -> Figure:
    moved: Counter[str] = Counter()
    for row in plan["traffic"]:
        moved[row["name"]] += row["numel"]
    bars: dict[str, dict[str, float]] = {}
    for row in plan["traffic"]:
        if row["name"] in dict(moved.most_common(MAX_UNITS)):
            own = bars.setdefault(row["name"], {})
            own[row["op"]] = own.get(row["op"], 0.0) + row["numel"] / 1e6
    rows = [
        (
            *(r[key] for key in ("name", "group", "op")),
            f"{r['calls']:,}",
            f"{r['numel']:,}",
            gib(r["sent_nbytes"]),
        )
        for r in plan["traffic"]
    ]
    calls: Counter[str] = Counter()
    numels: Counter[str] = Counter()
    for row in plan["traffic"]:
        calls[row["op"]] += row["calls"]
        numels[row["op"]] += row["numel"]
    text = "; ".join(f"{op}: {calls[op]:,} calls, {numels[op]:,} elements" for op in calls)
    left_out = len(rows) - MAX_ROWS
    return Figure(
        "Traffic of a step by unit",
        bar_chart(bars or {"nothing": {"all_gather": 0.0}}, "million elements of the whole tensors"),
        ("unit", "group", "collective", "calls", "elements", "sent by the rank, GiB"),
        rows[:MAX_ROWS],
        f"In all: {text or 'nothing'}."
        + (f" The {MAX_UNITS} units that move the most are drawn." if len(moved) > MAX_UNITS else "")
        + (f" {left_out:,} more rows are in the JSON." if left_out > 0 else ""),
    )  # fmt: skip


def _time(time: Mapping[str, Any]) -> Figure:
    bars = {"compute": {"busy": time["compute_s"]}}
    for stream, seconds in time["busy_s"].items():
        bars[stream] = {"busy": seconds, "exposed": time["exposed_s"].get(stream, 0.0)}
    rows = [(name, _s(each["busy"]), _s(each.get("exposed", 0.0))) for name, each in bars.items()]
    rows += [(f"compute, {kind}", _s(seconds), "") for kind, seconds in time["kinds_s"].items()]
    rows += [("update", _s(time["update_s"]), ""), ("host", _s(time["host_s"]), "")]
    rows += [("step", _s(time["total_s"]), "")]
    unmeasured = [f"{key} ({how})" for key, how in time["sources"].items() if how != "measured"]
    measured = (
        f"Not measured: {', '.join(unmeasured)}." if unmeasured else "All numbers were measured."
    )
    return Figure(
        "Time of a step by stream",
        bar_chart(bars, "seconds"),
        ("stream or part", "time", "exposed"),
        rows,
        f"Exposed: the device waits for it. {measured}",
    )


def _not_modelled_of_time(time: Mapping[str, Any] | None) -> list[str]:
    if time is None:
        return ["the time of a step: no machine was given"]
    return [f"of the time: {line}" for line in time["not_modelled"]]


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
