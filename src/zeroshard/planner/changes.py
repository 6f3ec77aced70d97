"""Finds what makes a planned run fit: the largest micro-batch, and changes of its configuration.

Arithmetic proposes changes, a simulation of each decides.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from zeroshard.comm.simulation import lone_rank
from zeroshard.core.texts import gib_text
from zeroshard.engine.remedies import Remedy, Run, changes, smaller_batches
from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.planner.candidates import Strategy
from zeroshard.planner.fit import calm_collector
from zeroshard.planner.growth import least_states_nbytes
from zeroshard.planner.make_plan import Asked, config_dict, make_plan
from zeroshard.planner.model_source import FACTORY_HINT, explained, model_source, refuse_own_batch
from zeroshard.planner.plan import SILENT, Audience, Change, Plan
from zeroshard.planner.planned_batch import MICRO_BATCH

MOST = 2**20
"""Samples of a micro-batch that are tried at most."""

_BY_LINE = 6
"""Tries along a line, after which the interval is halved: peaks are nearly linear in the batch."""


def largest_batch(peak_nbytes: Callable[[int], int], limit_nbytes: int) -> tuple[int, int]:
    """The largest number of samples whose peak is within the limit, and the peak of one more.

    ``peak_nbytes(samples)`` simulates a run; it must not fall with more samples. Both numbers of samples
    were simulated. Costs about five simulations.

    >>> largest_batch(lambda samples: 100 + 30 * samples, 1000)
    (30, 1030)

    Raises:
        UsageError: one sample does not fit, or ``MOST`` do.
    """
    fits, fits_nbytes = 1, peak_nbytes(1)
    if fits_nbytes > limit_nbytes:
        raise UsageError(
            f"no micro-batch fits {gib_text(limit_nbytes)}: one sample needs "
            f"{gib_text(fits_nbytes)}, {gib_text(fits_nbytes - limit_nbytes)} too much. Use shorter "
            "samples, activation checkpointing, a higher stage, offload or more ranks."
        )
    known = [(fits, fits_nbytes)]
    over: int | None = None
    while over is None or over - fits > 1:
        guess = _guess(known, fits, over, limit_nbytes)
        nbytes = peak_nbytes(guess)
        known.append((guess, nbytes))
        if nbytes > limit_nbytes:
            over = guess
        elif guess >= MOST:
            raise UsageError(
                f"a micro-batch of {MOST:,} samples fits {gib_text(limit_nbytes)}, and more are not "
                "tried: memory does not limit the batch. Give --batch a number."
            )
        else:
            fits = guess
    return fits, dict(known)[over]


def _guess(known: list[tuple[int, int]], fits: int, over: int | None, limit_nbytes: int) -> int:
    """The next number of samples to try, between ``fits`` and ``over``, without them."""
    if len(known) == 1:
        return 2
    (one, one_nbytes), (two, two_nbytes) = sorted(known, key=lambda at: abs(limit_nbytes - at[1]))[
        :2
    ]
    slope = (two_nbytes - one_nbytes) / (two - one)
    if over is not None and (len(known) > _BY_LINE or slope <= 0):
        return (fits + over) // 2
    line = one + int((limit_nbytes - one_nbytes) / slope) if slope > 0 else 2 * fits
    return max(fits + 1, min(line, MOST if over is None else over - 1))


def plan_of_largest_batch(
    asked: Asked, *, with_events: bool = False, audience: Audience = SILENT
) -> Plan:
    """The plan with the largest micro-batch that fits; one more sample does not fit.

    Errors as for :func:`make_plan`. ``audience`` is told of about five simulations.

    Raises:
        UsageError: there is no limit, one sample does not fit, the model has a batch of its own, or the
            configuration fixes ``train_batch_size``.
    """
    plans: dict[int, Plan] = {}

    def peak_nbytes(samples: int) -> int:
        if samples not in plans:
            audience.begins(f"micro-batch {samples}")
            plans[samples] = make_plan(asked, micro_batch=samples, with_events=with_events)
            audience.ended(plans[samples])
        return plans[samples].peak_nbytes

    if (fixed := config_dict(asked.config).get("train_batch_size")) not in (None, "auto"):
        raise UsageError(
            f"--batch max tries micro-batches of several sizes, and train_batch_size is {fixed}, which "
            "allows only its divisors. Leave it out of the configuration."
        )
    if not asked.has_limit:
        raise UsageError("--batch max is the largest that fits --memory, which is not given.")
    with explained(asked.model, FACTORY_HINT), lone_rank(0, asked.ranks):
        refuse_own_batch("--batch max", model_source(asked.model, 1, 1, sharded=False))
    peak_nbytes(1)
    limit_nbytes = plans[1].limit_nbytes
    assert limit_nbytes is not None
    samples, one_more_nbytes = largest_batch(peak_nbytes, limit_nbytes)
    return replace(plans[samples], one_more_nbytes=one_more_nbytes)


COUNT = 3
"""Changes that are shown."""


def with_changes(plan: Plan, asked: Asked, *, audience: Audience = SILENT) -> Plan:
    """A plan that does not fit, with up to three changes that make it fit; others stay as they are.

    ``asked``: of what the plan was made. Each stage, offload and checkpointing that may help costs a
    simulation, and a smaller micro-batch a few. ``audience`` is told of each.
    """
    if plan.fits is not False:
        return plan
    base, fixed = config_dict(asked.config), plan.own_batch

    def simulated(line: str, *, few: bool) -> Plan | None:
        audience.begins(line)
        found = planned(line, few=few)
        audience.ended(found)
        return found

    def planned(line: str, *, few: bool) -> Plan | None:
        keys = changed_keys(line)
        try:
            return make_plan(
                replace(asked, config=merged(base, keys)),
                micro_batch=None if fixed or MICRO_BATCH in keys else plan.micro_batch,
                checkpointing=not line.startswith("{"), few=few,
            )  # fmt: skip
        except (ConfigError, UnsupportedError):  # such as a stage that the mesh does not allow
            return None

    with calm_collector():
        return replace(plan, changes=changes_that_fit(plan, simulated))


class Simulated(Protocol):
    """The plan with one change, a line; None: it cannot be. ``few``: of few micro-batches of a step."""

    def __call__(self, line: str, *, few: bool) -> Plan | None: ...


def changes_that_fit(plan: Plan, simulated: Simulated) -> tuple[Change, ...]:
    """Single changes with which a plan fits, by slowdown per byte; at most :data:`COUNT`.

    A step of many micro-batches needs some bytes more than one of two, which are simulated first.
    """
    found = [_change(plan, proposed, after) for proposed, after in _proposed(plan, simulated)]
    found.sort(key=lambda each: each.slowdown / each.freed_nbytes)
    return tuple(itertools.islice(_confirmed(plan, simulated, found), COUNT))


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
    plans: dict[str, Plan | None] = {}

    def fits(own: Remedy) -> bool:
        after = plans[own.line] = simulated(own.line, few=True)
        return after is not None and after.fits is True

    at = bisect_left(sizes, True, key=fits)
    if at < len(sizes) and (found := plans[sizes[at].line]) is not None:
        yield sizes[at], found


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
