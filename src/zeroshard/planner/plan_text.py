"""A plan as text for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zeroshard.planner.plan import Plan
from zeroshard.planner.simulate import highest

GIB = 2**30


def show(plan: Plan, console: Console) -> None:
    """Print the plan."""
    for part in _parts(plan):
        if isinstance(part, str):
            console.print(escape(part), highlight=False, soft_wrap=True)
        else:
            console.print(part)


def headline(plan: Plan) -> str:
    """Whether the run fits, by how much, on which rank."""
    peak = (
        f"peak {plan.peak_nbytes / GIB:.2f} GiB in {plan.peak_phase} on rank {plan.simulation.rank}"
    )
    if plan.spare_nbytes is None or plan.limit_nbytes is None:
        return f"{peak}; no --memory given, so nothing to compare with"
    limit, spare = plan.limit_nbytes / GIB, plan.spare_nbytes / GIB
    verdict = (
        f"fits, {spare:.2f} GiB to spare"
        if plan.fits
        else f"does not fit: {-spare:.2f} GiB too much"
    )
    return f"{verdict} of {limit:.2f} GiB; {peak}"


def _parts(plan: Plan) -> Iterator[str | Table]:
    found = plan.simulation
    yield headline(plan)
    if plan.one_more_nbytes is not None and plan.limit_nbytes is not None:
        over = plan.one_more_nbytes - plan.limit_nbytes
        yield (
            f"micro-batch {plan.micro_batch} is the largest that fits: {plan.micro_batch + 1} needs "
            f"{plan.one_more_nbytes:,} bytes, {over:,} too many"
        )
    yield (
        f"{plan.model}: {found.params_numel:,} parameters, stage {plan.stage}, {plan.mesh.text}, "
        f"micro-batch {plan.micro_batch}; state at rest {plan.states_nbytes() / 1e9:.2f} GB"
    )
    yield _phases(plan)
    name, top = highest(found.moments)
    where = f", module {top.module}" if top.module else ""
    unit = plan.unit_of(top)
    yield f"highest in a step: {name}, {top.op}{where}{f', unit {unit}' if unit else ''}"
    yield _largest(plan)
    yield _traffic(plan)
    yield "assumed:"
    yield from (f"  - {line}" for line in plan.assumed)
    yield "not modelled:"
    yield from (f"  - {line}" for line in plan.not_modelled)


def _phases(plan: Plan) -> Table:
    moments = plan.simulation.moments
    table = Table(title="MiB at the peak of each phase")
    table.add_column("category")
    table.add_column("tier")
    for name in moments:
        table.add_column(name, justify="right")
    keys = dict.fromkeys(key for m in moments.values() for key, n in m.held.items() if n)
    for category, tier in keys:
        cells = [m.held.get((category, tier), 0) for m in moments.values()]
        table.add_row(category, tier, *map(_mib, cells))
    table.add_row("others", "device", *(_mib(m.activations_nbytes) for m in moments.values()))
    table.add_row("all", "device", *(_mib(m.device_nbytes) for m in moments.values()))
    return table


def _largest(plan: Plan) -> Table:
    table = Table(
        "MiB", "made by", "shape", "phase", "module", title="largest at the peak of a step"
    )
    for row in plan.simulation.largest[:10]:
        shape = f"{row.dtype} {list(row.shape)}"
        table.add_row(_mib(row.nbytes), row.op, escape(shape), row.phase, escape(row.module))
    return table


def _traffic(plan: Plan) -> Table:
    calls: Counter[tuple[str, str]] = Counter()
    numel: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    for row in plan.simulation.traffic:
        key = row.group, row.op
        calls[key] += row.calls
        numel[key] += row.numel
        sent[key] += row.sent_numel
    table = Table("group", "collective", "calls", "elements", "sent", title="traffic of a step")
    for key in calls:
        table.add_row(*key, f"{calls[key]:,}", f"{numel[key]:,}", f"{sent[key]:,}")
    return table


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f}"
