"""Puts a report together: figures, the tables behind them, and facts. The template escapes every text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.report.figures import BUCKETS, ROWS, Figure, bar_chart, buckets, line_chart, render
from zeroshard.report.record import Points, RunRecord, evidence, quantiles, read_records

MAX_INCIDENTS = 300
"""Incidents of a page. The oldest and the newest of each record are shown if there are more."""
MAX_IN_FULL = 5
"""Records with figures: the newest. They share ``BUCKETS`` and ``MAX_INCIDENTS``, for a small page."""
MAX_IN_TABLE = 1000
"""Other records in the table: the newest."""
MAX_TEXT = 200
"""Characters of a text in the table of other records."""


@dataclass(frozen=True)
class Chart:
    """One figure of values over steps: the names in the record, their unit, and the scale of the axis."""

    title: str
    names: tuple[str, ...]
    unit: str
    log: bool = False


CHARTS = (
    Chart("Loss", ("train_loss",), "mean over the ranks"),
    Chart("Norm of the gradient", ("grad_norm", "grad_norm_clipped"), "2-norm", log=True),
    Chart("Learning rate", ("lr",), "of the first param group"),
    Chart("Loss scale", ("loss_scale",), "factor", log=True),
    Chart("Throughput", ("samples_per_second",), "samples/s, all ranks"),
    Chart("Tokens", ("tokens_per_second",), "tokens/s, all ranks"),
    Chart("Model FLOPs utilization", ("mfu",), "part of the peak"),
    Chart(
        "Time of a step",
        (
            "step_time_ms", "exposed_comm_ms", "elapsed_time_ms_forward", "elapsed_time_ms_backward",
            "elapsed_time_ms_step",
        ),
        "ms, rank 0",
    ),
    Chart(
        "Memory in use",
        ("device_memory_gib", "device_memory_peak_gib", "host_memory_peak_gib"),
        "GiB, rank 0",
    ),
)  # fmt: skip


def make_page(folder: Path) -> str:
    """The page of a run as one HTML text without scripts, which loads nothing.

    The newest ``MAX_IN_FULL`` records have figures, and share the points of curves; a table has a row of
    each other one.

    Raises:
        UsageError: a record cannot be read, or matplotlib is missing.
    """
    records = read_records(folder)
    others, shown = records[:-MAX_IN_FULL], records[-MAX_IN_FULL:]
    return render(
        "page.html.j2",
        f"Run {folder.name}",
        sections=[_section(record, 1 / len(shown)) for record in shown],
        num_records=len(records),
        num_others=len(others),
        others=[_in_short(record) for record in others[-MAX_IN_TABLE:]],
        evidence=evidence(folder),
        failure=_failure(folder) if any(record.reason != "" for record in records) else "",
    )


def _failure(folder: Path) -> str:
    """Why the run ended, as ``zeroshard explain`` says it, and the traceback; "" if nothing is known.

    The record is that of rank 0, whose error only says that another rank has left.
    """
    try:
        from zeroshard.watchdog.dead_run import explain_run, text_of  # imports torch

        found = explain_run(folder)
    except (UsageError, ImportError):  # it lives, or no rank left anything; there is no torch
        return ""
    return "\n\n".join(filter(None, (text_of(found), found.trace.strip())))


def _in_short(record: RunRecord) -> tuple[str, ...]:
    """The row of a record that is not shown in full."""
    losses = record.values.get("train_loss")
    cells = (
        record.path.name, record.title, _date(record.first["time_s"]), _duration(record.seconds),
        f"{record.num_steps:,}", _number(losses[-1][1]) if losses else "",
        f"{len(record.incidents):,}", record.ending,
    )  # fmt: skip
    return tuple(cell if len(cell) <= MAX_TEXT else f"{cell[: MAX_TEXT - 1]}…" for cell in cells)


def _section(record: RunRecord, part: float) -> dict[str, Any]:
    """What the template shows of one record, which gets this ``part`` of the points and incidents."""
    first = record.first
    rows = [tuple(map(str, row)) for row in first["config"]]
    return {
        "title": record.title,
        "facts": _facts(record),
        "figures": _figures(record, max(1, int(BUCKETS * part))),
        "times": _times(record),
        "incidents": _incidents(record, int(MAX_INCIDENTS * part)),
        "num_incidents": len(record.incidents),
        "given": [row for row in rows if row[2] != "default"],
        "defaults": [row for row in rows if row[2] == "default"],
        "environment": list(first["environment"].items()),
        "dtypes": first["dtypes"],
        "notes": [*record.notes, *first["notes"]],
    }


def _facts(record: RunRecord) -> list[tuple[str, str]]:
    first = record.first
    skipped = sum(value == 1.0 for _, value in record.values.get("skipped", ()))
    steps = f"{record.num_steps:,}, the last one is step {record.last_step:,}"
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    mesh = ", ".join(f"{name} {size}" for name, size in first["mesh"].items() if size > 1)
    return [
        ("ended", record.ending),
        ("steps", steps + (f"; {skipped:,} skipped" if skipped else "")),
        ("time", f"{_duration(record.seconds)} since {_date(first['time_s'])}"),
        ("ranks", f"{first['world_size']}{f' ({mesh})' if mesh else ''}, {first['transport']}"),
        ("device", f"{first['device']} on {first['host']}"),
        ("ZeRO stage", str(first["stage"])),
        ("parameters", f"{first['parameters']:,} in {first['units']} units"),
        ("batch", f"{first['train_batch_size']} samples per step, "
                  f"{first['accumulation']} micro-batches per rank"),
        ("versions", versions),
        ("record", str(record.path.name)),
    ]  # fmt: skip


def _figures(record: RunRecord, count: int) -> list[Figure]:
    """``count``: buckets of each curve."""
    found = []
    for chart in CHARTS:
        curves = {name: record.values[name] for name in chart.names if name in record.values}
        is_constant = chart.title == "Loss scale" and {1.0} == {
            v for _, v in curves.get("loss_scale", ())
        }
        if curves and not is_constant:
            found.append(_over_steps(chart, curves, count))
    if record.facts:
        found += [_memory(record), _traffic(record)]
    return found


def _over_steps(chart: Chart, curves: dict[str, Points], count: int) -> Figure:
    rows = [
        (name, _span(bucket.first, bucket.last), *map(_number, bucket[2:5]), str(bucket.bad or ""))
        for name, points in curves.items()
        for bucket in buckets(points, max(5, ROWS // len(curves)))
    ]
    bad = sum(bucket.bad for points in curves.values() for bucket in buckets(points, 1))
    return Figure(
        chart.title,
        line_chart(curves, chart.unit, log=chart.log, count=count),
        ("value", "steps", "lowest", "mean", "highest", "not finite"),
        rows,
        f"{bad} values were not finite and are not drawn." if bad else "",
    )


def _memory(record: RunRecord) -> Figure:
    mib = 2**20
    rows = [
        row
        for row in record.facts["memory"]
        if (row["planned"] or row["measured"]) and row["category"] != "peak"
    ]
    bars = {}
    for row in rows:
        name = row["category"] if row["tier"] == "device" else f"{row['category']} ({row['tier']})"
        bars[name] = {"measured": row["measured"] / mib}
        if row["planned"] is not None:
            bars[name]["planned"] = row["planned"] / mib
    return Figure(
        "Memory, planned and measured",
        bar_chart(bars or {"nothing": {"measured": 0.0}}, "MiB, rank 0"),
        ("category", "planned, MiB", "measured, MiB"),
        [
            (name, *(f"{held[of]:.2f}" if of in held else "none" for of in ("planned", "measured")))
            for name, held in bars.items()
        ],
        "What rests between two steps, and the peaks of gradients, gathered parameters, buckets, scratch "
        "memory and activations, which a run does not plan (none). Activations are what the engine did "
        "not hold when a backward began; on a CPU the growth of the process. Every tenth step was looked "
        "at.",
    )  # fmt: skip


def _traffic(record: RunRecord) -> Figure:
    first, steps = record.first, max(1, record.steps_of_facts)
    psi = max(1, first["parameters"])
    bars: dict[str, dict[str, float]] = {}
    rows: dict[str, list[float]] = {}
    for entry in record.facts["traffic"]:
        op = entry["op"].partition(" ")[0]
        row = rows.setdefault(op, [0.0] * 5)
        for at, value in enumerate((
            entry["calls"], entry["payload_numel"] / psi, entry["sent_nbytes"] / 2**20,
            1e3 * entry["waited_s"],
        )):  # fmt: skip
            row[at] += value / steps
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        if op in rows:
            bars[op] = {"measured": rows[op][1]}
    wanted = expected_volume(first["stage"], first["accumulation"])
    for op, volume in wanted.items():
        bars.setdefault(op, {"measured": 0.0})["formula"] = volume
    return Figure(
        "Traffic of a step against the formula",
        bar_chart(bars, "elements moved, in numbers of parameters"),
        ("collective", "calls", "volume / parameters", "sent, MiB", "waited, ms"),
        [(op, *(f"{value:.4g}" for value in row[:4])) for op, row in sorted(rows.items())],
        f"The formula for stage {first['stage']} with {first['accumulation']} micro-batches: "
        + " + ".join(f"{volume:g} (all elements, {op})" for op, volume in wanted.items())
        + ". Less is moved for units that stay gathered from forward to backward, which `zeroshard plan` "
        "names; more by evaluations and by saving.",
    )


def expected_volume(stage: int, accumulation: int) -> dict[str, float]:
    """Elements moved in one step, in numbers of parameters (ZeRO paper, section 7).

    Stages 0 and 1 reduce once for each step, stages 2 and 3 for each micro-batch. Stage 3 gathers for
    every forward and every backward; the other stages gather new parameters once.

    >>> expected_volume(1, 4), expected_volume(3, 1)
    ({'all_gather': 1, 'reduce_scatter': 1}, {'all_gather': 2, 'reduce_scatter': 1})
    """
    reductions = accumulation if stage >= 2 else 1
    return {
        "all_gather": 2 * accumulation if stage == 3 else 1, "reduce_scatter": reductions
    }  # fmt: skip


def _times(record: RunRecord) -> list[tuple[str, ...]]:
    """Name, 10 %, median and 90 % of the times and rates."""
    names = [name for chart in CHARTS[4:8] for name in chart.names if name in record.values]
    return [(name, *map(_number, quantiles(record.values[name]))) for name in names]


def _incidents(record: RunRecord, count: int) -> list[tuple[str, str, str]]:
    """At most ``count``, which is 2 or more."""
    found = record.incidents
    if len(found) > count:
        found = [*found[: count // 2], *found[-(count // 2) :]]
    return [(str(step), _date(time_s), text) for step, time_s, text in found]


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _number(value: float) -> str:
    return f"{value:.6g}"


def _date(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_s))


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
