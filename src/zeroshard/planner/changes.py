"""Finds changes that make a planned run fit. Arithmetic proposes them, a simulation of each decides."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from zeroshard.engine.remedies import Remedy, Run, changes, smaller_batches
from zeroshard.errors import ConfigError, UnsupportedError
from zeroshard.planner.audience import SILENT, Audience
from zeroshard.planner.candidates import Strategy
from zeroshard.planner.fit import calm_collector
from zeroshard.planner.least_states import least_states_nbytes
from zeroshard.planner.make_plan import config_dict, make_plan
from zeroshard.planner.own_batch import MICRO_BATCH
from zeroshard.planner.plan import Change, Plan

if TYPE_CHECKING:
    from zeroshard.config.machine_file import MachineFile
    from zeroshard.planner.gpu_kernels import Target

COUNT = 3
"""Changes that are shown."""


def with_changes(
    plan: Plan,
    model: str,
    config: Mapping[str, Any] | str | Path,
    *,
    length: int | None = None,
    memory_gib: float | None = None,
    machine: MachineFile | None = None,
    target: Target | None = None,
    ranks_per_node: int | None = None,
    audience: Audience = SILENT,
) -> Plan:
    """A plan that does not fit, with up to three changes that make it fit; others stay as they are.

    Arguments as for :func:`~zeroshard.planner.make_plan.make_plan`, which made the plan. Each stage,
    offload and checkpointing that may help costs a simulation, and a smaller micro-batch a few.
    ``audience`` is told of each.
    """
    if plan.fits is not False:
        return plan
    base, fixed = config_dict(config), plan.own_batch

    def simulated(line: str, *, few: bool) -> Plan | None:
        audience.begins(line)
        found = planned(line, few=few)
        audience.ended(found)
        return found

    def planned(line: str, *, few: bool) -> Plan | None:
        keys = changed_keys(line)
        try:
            return make_plan(
                model, merged(base, keys), ranks=plan.mesh.world_size,
                micro_batch=None if fixed or MICRO_BATCH in keys else plan.micro_batch,
                length=length, memory_gib=memory_gib, machine=machine, target=target,
                checkpointing=not line.startswith("{"), few=few, ranks_per_node=ranks_per_node,
            )  # fmt: skip
        except (ConfigError, UnsupportedError):  # such as a stage that the mesh does not allow
            return None

    with calm_collector():
        return replace(plan, changes=changes_that_fit(plan, simulated))


class Simulated(Protocol):
    """The plan with one change, a line; None: it cannot be. ``few``: of few micro-batches of a step."""

    def __call__(self, line: str, *, few: bool) -> Plan | None: ...


def changes_that_fit(plan: Plan, simulated: Simulated, count: int = COUNT) -> tuple[Change, ...]:
    """Single changes with which a plan fits, by slowdown per byte; at most ``count``.

    A step of many micro-batches needs some bytes more than one of two, which are simulated first.
    """
    found = [_change(plan, proposed, after) for proposed, after in _proposed(plan, simulated)]
    found.sort(key=lambda each: each.slowdown / each.freed_nbytes)
    return tuple(itertools.islice(_confirmed(plan, simulated, found), count))


def _confirmed(plan: Plan, simulated: Simulated, found: Sequence[Change]) -> Iterator[Change]:
    run = plan.simulation.run
    for each in found:
        steps = changed_keys(each.line).get("gradient_accumulation_steps", run.accumulation)
        whole = simulated(each.line, few=False) if steps > 2 else None
        if steps <= 2:
            yield each
        elif whole is not None and whole.fits:
            freed = plan.peak_nbytes - whole.peak_nbytes
            yield replace(each, peak_nbytes=whole.peak_nbytes, freed_nbytes=freed)


def _proposed(plan: Plan, simulated: Simulated) -> Iterator[tuple[Remedy, Plan]]:
    serial = plan.time is not None and plan.time.serial  # then host memory counts as well
    run = replace(plan.simulation.run, has_host=not serial)
    for proposed in changes(run):
        if not _states_alone_are_too_large(plan, run, proposed):
            after = simulated(proposed.line, few=True)
            if after is not None and after.fits:
                yield proposed, after
    if not plan.own_batch:
        yield from _largest(list(smaller_batches(run)), simulated)


def _largest(sizes: Sequence[Remedy], simulated: Simulated) -> Iterator[tuple[Remedy, Plan]]:
    """The largest micro-batch that fits, by bisection. ``sizes``: from the largest to the smallest."""
    low, high = 0, len(sizes)
    best: tuple[Remedy, Plan] | None = None
    while low < high:
        at = (low + high) // 2
        after = simulated(sizes[at].line, few=True)
        if after is not None and after.fits:
            best, high = (sizes[at], after), at
        else:
            low = at + 1
    if best is not None:
        yield best


def _states_alone_are_too_large(plan: Plan, run: Run, proposed: Remedy) -> bool:
    """Whether arithmetic on states rules a change out, which is cheaper than a simulation."""
    zero = changed_keys(proposed.line).get("zero_optimization")
    if zero is None or plan.limit_nbytes is None:
        return False
    strategy = Strategy(
        zero["stage"],
        optimizer=run.offloads_optimizer or "offload_optimizer" in zero,
        params=run.offloads_params or "offload_param" in zero,
    )
    mesh = plan.mesh
    least_nbytes = least_states_nbytes(
        plan.of_stages, plan.stage, strategy, mesh.tensor, mesh.pipeline, mesh.expert
    )
    return least_nbytes > plan.limit_nbytes


def _change(plan: Plan, proposed: Remedy, after: Plan) -> Change:
    predicted = plan.time is not None and after.time is not None
    slowdown = proposed.slowdown
    if plan.time is not None and after.time is not None:
        slowdown = after.time.total_s / plan.time.total_s - 1
    freed = plan.peak_nbytes - after.peak_nbytes
    return Change(proposed.text, proposed.line, after.peak_nbytes, freed, slowdown, predicted)


def changed_keys(line: str) -> dict[str, Any]:
    """The keys of the configuration that a change sets; none if it is a line of the program."""
    keys: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return keys


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, section by section.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    inner = {k: merged(config[k], v) for k, v in changes.items() if isinstance(config.get(k), dict)}
    return {**config, **changes, **inner}
