"""Searches a configuration that fits: stage, offload, mesh, checkpointing and micro-batch.

The batch of a step stays: with more tensor ranks or pipeline stages each data-parallel rank has more
samples. With a machine, candidates are ordered by the predicted time of a step
(:mod:`zeroshard.planner.fit_time`). Without one they are ordered by how much they slow a step down, as
far as this is known: first by
:func:`~zeroshard.planner.candidates.kinds_by_experience`, then by larger micro-batches. The peak of a
strategy grows with the micro-batch. So one simulation with one sample rules out a strategy that does not
fit, and bisection finds the largest micro-batch of the first one that does: hundreds of candidates cost
about ten simulations. What is printed was simulated.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from zeroshard.comm.simulation import lone_rank
from zeroshard.config import load_config
from zeroshard.config.machine_file import MachineFile
from zeroshard.errors import ConfigError, UsageError
from zeroshard.experts.stacked import planned_stacks
from zeroshard.parallel.split import PipelineModel
from zeroshard.planner.assumptions import mesh_of
from zeroshard.planner.axes import (
    axis_sizes,
    check_axes_are_free,
    refused_by_model,
    samples_by_sizes,
    sizes_of,
)
from zeroshard.planner.candidates import (
    AS_CONFIGURED,
    Aim,
    Candidate,
    Fit,
    Judged,
    Sizes,
    Strategy,
    kinds_by_experience,
    next_larger,
    possible,
    refused_by_schedule,
)
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.fit_time import search_by_time
from zeroshard.planner.make_plan import Asked, config_dict, make_plan, with_node_size
from zeroshard.planner.model_source import (
    can_checkpoint,
    even_split,
    explained,
    model_source,
    refuse_own_batch,
)
from zeroshard.planner.plan import SILENT, Audience, Plan


def fit(
    asked: Asked,
    *,
    aim: Aim,
    axes: Mapping[str, Sequence[int]] | None = None,
    audience: Audience = SILENT,
) -> Fit:
    """The configuration for a model that fits the memory of a device, with the batch of a step as it is.

    Errors as for :func:`~zeroshard.planner.make_plan.make_plan`. ``aim``: see :func:`search`; with a
    machine, "speed" is the smallest predicted time of a step. ``axes``: of the mesh that may change, as
    :func:`~zeroshard.planner.axes.read_axes` gives them; None: the mesh stays. ``audience`` is told of
    each simulation.

    Raises:
        UsageError: there is no limit, the model has a batch of its own, or no size of an axis is
            possible.
    """
    if not asked.has_limit:
        raise UsageError(f"--fit {aim} needs --memory, or a --machine whose memory is known.")
    base = config_dict(asked.config)
    samples, refused = _samples(asked, base, dict(axes or {}))

    def simulated(candidate: Candidate) -> Plan:
        audience.begins(candidate.text)
        found = make_plan(
            replace(asked, config=candidate.config(base)),
            checkpointing=candidate.checkpointing, few=True,
        )  # fmt: skip
        audience.ended(found)
        return found

    with explained(asked.model), lone_rank(0, asked.ranks):
        source = model_source(asked.model, 1, 1, sharded=False)
        refuse_own_batch("--fit", source)
        able = can_checkpoint(source)
    machine = with_node_size(asked.machine, asked.ranks, asked.ranks_per_node)
    with calm_collector():
        if machine is not None and aim == "speed":
            result = search_by_time(simulated, base, machine, samples=samples, can_checkpoint=able)
        else:
            result = search(simulated, base, aim=aim, samples=samples, can_checkpoint=able)
    return replace(result, refused=refused, split=_split(asked, result.chosen))


def sharing_sizes(model: str, ranks: int, machine: MachineFile | None) -> tuple[int, ...]:
    """1 and the most ranks of a node that can share the experts of a layer; () if there are no such.

    ``model``: as for :func:`fit`. Layers of :class:`zeroshard.parallel.MoE` have none here: the program
    says how many ranks share them.
    """
    node = axis_sizes("expert", (), ranks=ranks, machine=machine)
    built = _built(model, ranks)
    stacks = {} if isinstance(built, PipelineModel) else planned_stacks(built)
    counts = [int(stack.num_experts) for stack in stacks.values()]  # type: ignore[arg-type]
    most = max((size for size in node if not any(count % size for count in counts)), default=1)
    return (1, most) if counts and most > 1 else ()


def _samples(
    asked: Asked, base: Mapping[str, Any], wanted: dict[str, Sequence[int]]
) -> tuple[dict[Sizes, int], dict[Sizes, str]]:
    """Samples of a rank by mesh, and why others cannot be used. ``wanted``: axes that may change."""
    ranks = asked.ranks
    settings = load_config(base, world_size=ranks).config
    mesh = mesh_of(settings, ranks)
    if mesh.pipeline > 1:
        wanted.setdefault("pipeline", (mesh.pipeline,))
    if not wanted:
        size, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
        assert size is not None  # computed where it is not given
        return {AS_CONFIGURED: size * (steps or 1)}, {}
    assert settings.train_batch_size is not None  # computed where it is not given
    check_axes_are_free(base, wanted)
    sizes = sizes_of(
        wanted, ranks=ranks, machine=asked.machine, ranks_per_node=asked.ranks_per_node
    )
    found, refused = samples_by_sizes(settings.train_batch_size, sizes, ranks, tensor=mesh.tensor)
    return _possible(asked, base, found, refused)


def _split(asked: Asked, chosen: Candidate | None) -> Sequence[str]:
    """Where the program must cut the model for the chosen pipeline."""
    stages = 1 if chosen is None else chosen.sizes.pipeline or 1
    if stages == 1:
        return ()
    built = _built(asked.model, asked.ranks)
    return () if isinstance(built, PipelineModel) else even_split(built, stages)


def _built(model: str, ranks: int) -> nn.Module:
    with explained(model), lone_rank(0, ranks), fake_tensors():
        return model_source(model, 1, 1, sharded=False).build()


def _possible(
    asked: Asked,
    base: Mapping[str, Any],
    samples: Mapping[Sizes, int],
    refused: dict[Sizes, str],
) -> tuple[dict[Sizes, int], dict[Sizes, str]]:
    """Samples of a rank by mesh, and why others cannot be used. ``refused``: those known already."""
    for sizes, own in samples.items():
        try:
            trial = Candidate(Strategy(0), False, 1, own, sizes).config(base)
            load_config(trial, world_size=asked.ranks)
        except ConfigError as error:
            refused[sizes] = str(error)
    with explained(asked.model), lone_rank(0, asked.ranks):
        build = model_source(asked.model, 1, 1, sharded=False).build
        refused |= refused_by_model(build, [each for each in samples if each not in refused])
    found = {sizes: own for sizes, own in samples.items() if sizes not in refused}
    if not found:
        reasons = "; ".join(f"{sizes.text}: {why}" for sizes, why in refused.items())
        raise UsageError(f"--fit: no mesh is possible. {reasons}")
    return found, refused


@contextmanager
def calm_collector() -> Iterator[None]:
    """Keep the garbage collector from looking at all that exists now, such as the modules of torch.

    A search makes millions of objects, and a full collection per hundred thousand takes 15 % of its time.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def search(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    *,
    aim: Aim,
    samples: Mapping[Sizes, int],
    can_checkpoint: bool,
) -> Fit:
    """The first candidate that fits, in the order of ``aim``.

    ``simulated`` gives a candidate's plan. ``samples``: of one rank in a step, by mesh. "speed": the
    fastest candidate that fits, in the order of experience.
    "memory": the one with the smallest peak.
    """
    plans: dict[Candidate, Plan] = {}

    def plan(own: Candidate) -> Plan:
        if own not in plans:
            plans[own] = simulated(own)
        return plans[own]

    kinds = {
        kind: possible(kind, samples[kind.sizes])
        for kind in kinds_by_experience(list(samples), can_checkpoint=can_checkpoint)
    }
    chosen: Candidate | None = None
    looked: list[Candidate] = []
    for ways in kinds.values():
        looked.append(ways[0])
        if aim == "speed" and plan(ways[0]).fits:
            chosen = _largest(plan, ways)
            break
    smallest = min(looked, key=lambda each: plan(each).peak_nbytes)
    if aim == "memory" and plan(smallest).fits:
        chosen = smallest
    larger = None
    if chosen is not None and aim == "speed":
        after = next_larger(chosen, kinds[chosen.kind])
        if after is not None:
            larger = Judged(after, plan(after).peak_nbytes, None, True, "does not fit")
    best = chosen or smallest
    judged = [_judged(plans, own, chosen, aim, looked) for ways in kinds.values() for own in ways]
    judged += refused_by_schedule(kinds, samples)
    return Fit(
        aim, chosen, plan(best), best.config(base), judged, larger, len(plans),
        "The ranking is a rule of thumb; give --machine for predicted times.",
    )  # fmt: skip


def _judged(
    plans: Mapping[Candidate, Plan],
    own: Candidate,
    chosen: Candidate | None,
    aim: Aim,
    looked: Sequence[Candidate],
) -> Judged:
    """Why a candidate was not chosen. ``looked``: those of one sample that were simulated."""
    first = replace(own, micro_batch=1, accumulation=own.micro_batch * own.accumulation)
    known = plans.get(own)
    if own == chosen:
        why = "chosen"
    elif first not in looked:
        why = "slower in the order of experience"
    elif not plans[first].fits:
        why = "does not fit" + ("" if own == first else " with one sample")
    elif chosen is None or aim == "memory":
        why = "needs more memory"
    elif own.micro_batch < chosen.micro_batch:
        why = "smaller micro-batches are slower"
    else:
        why = "does not fit, as the next larger micro-batch"
    return Judged(own, None if known is None else known.peak_nbytes, None, known is not None, why)


def _largest(plan: Callable[[Candidate], Plan], ways: Sequence[Candidate]) -> Candidate:
    """The candidate with the largest micro-batch that fits. One sample does.

    The largest size is tried first: without accumulation a step holds less, so it may fit although a
    smaller one does not.
    """
    if plan(ways[-1]).fits:
        return ways[-1]
    too_large = bisect_right(
        ways, False, lo=1, hi=len(ways) - 1, key=lambda way: not plan(way).fits
    )
    return ways[too_large - 1]
