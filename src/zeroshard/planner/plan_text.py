"""A plan as text for a terminal."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from zeroshard.core.texts import HIDDEN, gib, gib_text
from zeroshard.planner.assumptions import PROCESS_NBYTES
from zeroshard.planner.candidates import Candidate, Fit, Judged, StrategyKind
from zeroshard.planner.checkpoint_phases import CheckpointNeeds
from zeroshard.planner.plan import Change, Plan, blocks, timeline
from zeroshard.planner.simulated import OUTSIDE_STEP, Simulation, highest
from zeroshard.planner.step_time import StepTime

TEXT_MOMENTS = 60
"""Moments of the timeline."""

SHOWN_UNITS = 8
"""Units that are named in one line."""

FILE_WIDTH = 160
"""Columns of an output that is no terminal."""


def plan_console() -> Console:
    """Where a plan is printed: as wide as the terminal or ``COLUMNS``, else :data:`FILE_WIDTH`."""
    return Console(emoji=False, width=shutil.get_terminal_size((FILE_WIDTH, 24)).columns)


def show(plan: Plan, console: Console, *, verbose: bool = False) -> None:
    """Print the plan. ``verbose``: also what is not modelled."""
    for part in _parts(plan, verbose):
        if isinstance(part, str):
            _say(part, console)
        else:
            _show_table(part, console)


def _show_table(table: Table, console: Console) -> None:
    """Print a table whose numbers are whole, also if it is wider than the console then.

    Columns that are aligned to the right have numbers. Texts of the others may be on several lines.
    """
    for column in table.columns:
        if column.justify == "right":
            cells = [str(cell) for cell in (column.header, *column.cells)]
            column.no_wrap = True
            column.min_width = max(cell_len(line) for cell in cells for line in cell.split("\n"))
        else:
            column.overflow = "fold"
    wide = console.options.update(width=10 * FILE_WIDTH)
    console.width = max(console.width, Measurement.get(console, wide, table).minimum)
    console.print(table)


def _table(texts: Sequence[str], numbers: Sequence[str], *, title: str) -> Table:
    """An empty table with columns of texts, and then of numbers."""
    table = Table(*texts, title=title)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _say(text: str, console: Console) -> None:
    """Print a text as it is, in one line."""
    console.print(escape(text), highlight=False, soft_wrap=True)


def show_fit(fit: Fit, console: Console, *, verbose: bool = False) -> None:
    """Print the result of a search: the configuration, why others lost, and the plan."""
    limit = fit.plan.limit_nbytes
    assert limit is not None  # a search has one
    if fit.chosen is None:
        over = fit.plan.peak_nbytes - limit
        _say(
            f"nothing fits {gib_text(limit)}: the smallest of {fit.count} configurations needs "
            f"{gib_text(fit.plan.peak_nbytes)}, {gib_text(over)} too much. Use more ranks or "
            "shorter samples.",
            console,
        )
    else:
        _show_chosen(fit, fit.chosen, console)
    _show_table(_best_of_kinds(fit), console)
    if (larger := fit.larger) is not None:
        size, peak = larger.candidate.micro_batch, gib_text(larger.peak_nbytes or 0)
        _say(f"micro-batch {size} {larger.why} ({peak})", console)
    for sizes, why in fit.refused.items():
        _say(f"{sizes.text} is not possible: {why}", console)
    for why, kinds in _left_out(fit).items():
        _say(f"not simulated: {'; '.join(kinds)}: {why}", console)
    _say(
        f"{fit.count} configurations by {fit.simulations} simulations; --json has why each was not "
        f"chosen. {fit.order}\n",
        console,
    )
    show(fit.plan, console, verbose=verbose)


def _show_chosen(fit: Fit, chosen: Candidate, console: Console) -> None:
    """Print the configuration, and what it needs of the program."""
    _say(f"{chosen.text}\n", console)
    console.print_json(json.dumps(fit.shown_config))
    if HIDDEN in json.dumps(fit.shown_config):
        _say(f"write your secrets in place of {HIDDEN}\n", console)
    if chosen.checkpointing:
        _say(
            "and in the program: model.gradient_checkpointing_enable() (Trainer: "
            "gradient_checkpointing=True)\n",
            console,
        )
    if fit.split:
        _say(
            "and in the program: model = zeroshard.parallel.pipeline(model, "
            f"split={list(fit.split)!r}), and engine.train_batch(...) for each step\n",
            console,
        )


def _best_of_kinds(fit: Fit) -> Table:
    """One row for each stage, offload, mesh and checkpointing: of what fits the fastest."""
    axes = list(dict.fromkeys(axis for each in fit.judged for axis in each.candidate.sizes.by_axis))
    numbers = (*axes, "micro-batch", "peak", "step")
    table = _table(("configuration", "checkpointing"), numbers, title="the best of each kind")
    table.add_column("")
    for kind, rows in kinds_of(fit).items():
        best = min(rows, key=_rank)
        if best.peak_nbytes is None:  # left out
            continue
        peak, seconds = best.peak_nbytes, best.seconds
        table.add_row(
            kind.strategy.text, "yes" if kind.checkpointing else "no",
            *(str(best.candidate.sizes.by_axis[axis]) for axis in axes),
            str(best.candidate.micro_batch), gib_text(peak), "" if seconds is None else _s(seconds),
            escape(best.why),
        )  # fmt: skip
    return table


def _left_out(fit: Fit) -> dict[str, list[str]]:
    """Why kinds were not simulated, and those kinds in words."""
    reasons: dict[str, list[str]] = {}
    for kind, rows in kinds_of(fit).items():
        if all(row.peak_nbytes is None for row in rows):
            on = ", with activation checkpointing" if kind.checkpointing else ""
            reasons.setdefault(rows[0].why, []).append(f"{kind.strategy.text}{on}")
    return reasons


def kinds_of(fit: Fit) -> dict[StrategyKind, list[Judged]]:
    """The candidates of each stage, offload and mesh, with or without checkpointing."""
    kinds: dict[StrategyKind, list[Judged]] = {}
    for each in fit.judged:
        kinds.setdefault(each.candidate.kind, []).append(each)
    return kinds


def _rank(row: Judged) -> tuple[bool, bool, bool, float]:
    fails = row.why.startswith("does not fit")
    unknown = row.peak_nbytes is None
    value = (row.peak_nbytes or 0) if fails else row.seconds or 0.0
    return row.why != "chosen", unknown, fails, value


def headline(plan: Plan) -> str:
    """Whether the run fits, by how much, on which rank, and which device that is."""
    device = {"cpu": "CPU", "cuda": "GPU"}[plan.target]
    peak = (
        f"peak {gib_text(plan.peak_nbytes)} in {plan.peak_phase} on rank {plan.simulation.rank}, "
        f"a {device}"
    )
    if plan.spare_nbytes is None or plan.limit_nbytes is None:
        return f"{peak}; no --memory given, so nothing to compare with"
    spare = plan.spare_nbytes
    verdict = (
        f"fits, {gib_text(spare)} to spare"
        if plan.fits
        else f"does not fit: {gib_text(-spare)} too much"
    )
    return f"{verdict} of {gib_text(plan.limit_nbytes)}; {peak}"


def outside_lines(plan: Plan) -> Iterator[str]:
    """If the highest peak is not in a step: what a step needs, and how to lower a peak in ``init``."""
    if plan.peak_phase not in OUTSIDE_STEP:
        return
    peak = plan.peaks[plan.step_phase]
    verdict = ""
    if plan.limit_nbytes is not None:
        spare = plan.limit_nbytes - peak
        verdict = (
            f" fits, {gib_text(spare)} to spare"
            if spare >= 0
            else f" does not fit: {gib_text(-spare)} too much"
        )
    yield f"a step alone{verdict or ' needs less'}; peak {gib_text(peak)} in {plan.step_phase}"
    if plan.peak_phase != "init":
        return
    if plan.mesh.tensor > 1:
        why = "each rank builds the whole model, before it is cut over tensor ranks"
    elif plan.mesh.pipeline > 1:
        why = "each rank builds the whole model, before it keeps its pipeline stage"
    else:
        why = "the model is there as it is built, beside what the engine makes of it"
    yield (
        f"init: {why}; all of it counts as device memory here. Built on the meta device "
        '(with torch.device("meta"): ...) the model takes none before the engine exists; modules with '
        "parameters then need reset_parameters(), which gives them their first values. To plan that, "
        "give module:function."
    )


def _parts(plan: Plan, verbose: bool) -> Iterator[str | Table]:
    found = plan.simulation
    yield headline(plan)
    yield from outside_lines(plan)
    if plan.changes is not None:
        yield from change_lines(plan.changes)
    yield from _one_more(plan)
    yield (
        f"{plan.model}: {found.params_numel:,} parameters, stage {plan.stage}, "
        f"{plan.mesh.text_with_experts}, "
        f"micro-batch {plan.micro_batch}; "
        f"state at rest {gib_text(found.states_nbytes)}"
    )
    if plan.stages:
        yield _stages(plan)
    yield _phases(plan)
    yield _moment_line(plan)
    points = timeline(found.events, TEXT_MOMENTS)
    phases = ", ".join(dict.fromkeys(held.phase for _, held in points))
    yield f"over the step ({phases}): {blocks(points)}"
    yield _largest(plan)
    yield _traffic(plan)
    if plan.stage == 3:
        yield f"units that stay gathered from forward to backward: {_kept(found.kept)}"
    yield from _file_lines(found)
    if plan.time is not None:
        yield from time_lines(plan.time)
    yield from _limits_of(plan, verbose)


def _one_more(plan: Plan) -> Iterator[str]:
    """If the micro-batch is the largest that fits: how much the next one would need."""
    if plan.one_more_nbytes is not None and plan.limit_nbytes is not None:
        over = plan.one_more_nbytes - plan.limit_nbytes
        yield (
            f"micro-batch {plan.micro_batch} is the largest that fits: {plan.micro_batch + 1} needs "
            f"{gib_text(plan.one_more_nbytes)}, {gib_text(over)} too much"
        )


def _moment_line(plan: Plan) -> str:
    """Where in a step the device holds the most."""
    name, top = highest(plan.simulation.moments)
    module = f", module {top.module}" if top.module else ""
    unit = f", unit {found}" if (found := plan.unit_of(top)) else ""
    line = f", at {top.line}" if top.line else ""
    return f"highest in a step: {name}, {top.op}{module}{unit}{line}"


def _file_lines(found: Simulation) -> Iterator[str]:
    """What the rank reads and writes of swap files and of a checkpoint."""
    if found.file_nbytes:
        read, written = found.swapped
        yield (
            f"disk: {gib_text(found.file_nbytes)} of files; a step reads {gib_text(read)} and writes "
            f"{gib_text(written)}"
        )
    if found.checkpoint is not None:
        yield checkpoint_line(found.checkpoint)


def _limits_of(plan: Plan, verbose: bool) -> Iterator[str]:
    """What the plan assumes, and what it does not contain: how many things, or each if ``verbose``."""
    yield "assumed:"
    yield from (f"  - {line}" for line in plan.assumed)
    left_out = [*plan.not_modelled]
    if plan.time is None:
        left_out.append("the time of a step: no --machine was given")
    else:
        left_out += [f"of the time: {line}" for line in plan.time.not_modelled]
    if verbose:
        yield "not modelled:"
        yield from (f"  - {line}" for line in left_out)
    else:
        yield f"{len(left_out)} things are not modelled: --verbose lists them"


def change_lines(changes: Sequence[Change]) -> Iterator[str]:
    """Changes with which the run fits, in sentences."""
    if not changes:
        yield (
            "no single change of stage, micro-batch, activation checkpointing or offload makes it fit; "
            "--fit speed looks at all combinations"
        )
        return
    yield "each of these changes makes it fit (simulated); cheapest per byte first:"
    for number, each in enumerate(changes, start=1):
        how = "predicted" if each.predicted else "assumed"
        yield (
            f"  {number}. {each.text}: peak {gib_text(each.peak_nbytes)}, "
            f"{gib_text(each.freed_nbytes)} less; a step takes {each.slowdown:+.0%} ({how})"
        )
        yield f"     {each.line}"


def checkpoint_line(needs: CheckpointNeeds) -> str:
    """What a checkpoint needs on the rank, as a sentence."""
    copied = f", a copy of {gib_text(needs.copy_nbytes)}" if needs.copy_nbytes else ""
    return (
        f"a checkpoint: this rank writes {gib_text(sum(needs.files.values()))} in {len(needs.files)} "
        f"file(s); host memory to save {gib_text(needs.write_nbytes)}{copied}, to load at most "
        f"{gib_text(needs.read_nbytes)}"
    )


def time_lines(time: StepTime) -> Iterator[str]:
    """The time of a step, in sentences."""
    total, half, parts = time.total_s, time.band * time.total_s, time.timing
    clock = "CPU time" if time.serial else "wall time"
    if time.serial and time.stages > 1:
        clock = "wall time, with a core for each rank"
    yield (
        f"step on {time.machine}: {_s(total)} {clock} ({_s(total - half)} to {_s(total + half)}); "
        f"{time.samples / total:,.1f} samples/s"
        + (f", {time.tokens / total:,.0f} tokens/s" if time.tokens else "")
    )
    busy, exposed = sum(parts.busy_s.values()), sum(parts.exposed_s.values())
    kinds = ", ".join(f"{kind} {_s(s)}" for kind, s in time.kinds.items())
    yield (
        f"  compute {_s(parts.compute_s)} (update {_s(time.update_s)}; without it: {kinds}), "
        f"communication and copies {_s(busy)}, of these exposed {_s(exposed)}, "
        f"{'operations of the host' if time.serial else 'waits for the host'} {_s(parts.host_s)}"
    )
    for stream, seconds in parts.busy_s.items():
        yield f"  {stream}: {_s(seconds)}, exposed {_s(parts.exposed_s.get(stream, 0.0))}"
    late, exposed = time.late_gathers()
    if late > 1 and not time.serial:  # nothing runs before the first
        yield (
            f"  {late} all-gathers start late and cost {_s(exposed)}. A larger "
            "zero_optimization.stage3_prefetch_bucket_size, and overlap_comm, start them earlier"
        )
    if time.stages > 1:
        yield (
            f"  waits for other pipeline stages: {_s(parts.stages_s)}, {parts.stages_s / total:.1%} of "
            "the step"
        )
    yield (
        f"  The band is {time.band:.0%} of the total: "
        + ("all numbers were measured." if not time.not_measured else "not measured were "
           f"{', '.join(time.not_measured)}.")
    )  # fmt: skip


def _s(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _stages(plan: Plan) -> Table:
    names = (
        "stage", "rank", "parameters", "states,\nGiB", "peak,\nGiB", "in\nflight", "sent,\nGiB",
        *(("computes", "waits") if plan.stage_times else ()),
    )  # fmt: skip
    title = "pipeline stages; what follows is of the one with the highest peak"
    table = _table((), names, title=title)
    for at, each in enumerate(plan.stages):
        timings = [time.timing for time in plan.stage_times[at : at + 1]]
        table.add_row(
            *(str(at), str(each.rank), f"{each.parameters:,}", gib(each.states_nbytes)),
            *(gib(each.peak_nbytes), str(each.in_flight), gib(each.sent_nbytes)),
            *(cell for own in timings for cell in (_s(own.compute_s), _s(own.stages_s))),
        )
    return table


def _phases(plan: Plan) -> Table:
    moments = plan.simulation.moments
    table = _table(("category", "tier"), list(moments), title="GiB at the peak of each phase")
    keys = dict.fromkeys(key for m in moments.values() for key, n in m.held.items() if n)
    for category, tier in keys:
        cells = [m.held.get((category, tier), 0) for m in moments.values()]
        table.add_row(category, tier, *map(gib, cells))
    table.add_row(
        "activations, others", "device", *(gib(m.activations_nbytes) for m in moments.values())
    )
    table.add_row("all", "device", *(gib(m.device_nbytes) for m in moments.values()))
    table.add_row("interpreter, torch", "host", *[gib(PROCESS_NBYTES)] * len(moments))
    return table


def _largest(plan: Plan) -> Table:
    table = _table((), ("GiB",), title="largest at the peak of a step")
    for name in ("made by", "shape", "phase", "module"):
        table.add_column(name)
    for row in plan.simulation.largest[:10]:
        shape = f"{row.dtype} {list(row.shape)}"
        table.add_row(gib(row.nbytes), row.op, escape(shape), row.phase, escape(row.module))
    return table


def _traffic(plan: Plan) -> Table:
    calls: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for row in plan.simulation.traffic:
        key = row.group, row.op
        calls[key] += row.calls
        sent[key] += row.sent_nbytes
    table = _table(("group", "collective"), ("calls", "sent, GiB"), title="traffic of a step")
    for key in calls:
        table.add_row(*key, f"{calls[key]:,}", gib(sent[key]))
    return table


def _kept(names: Sequence[str]) -> str:
    """Names of units, not all of many."""
    shown = ", ".join(names[:SHOWN_UNITS]) or "none"
    left = len(names) - SHOWN_UNITS
    return f"{shown} and {left} more (--json has all)" if left > 0 else shown
