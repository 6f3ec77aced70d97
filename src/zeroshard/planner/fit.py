"""Searches a configuration that fits: stage, offload, tensor ranks, checkpointing and micro-batch.

The batch of a step stays: with more tensor ranks each data-parallel rank has more samples. With a
machine, candidates are ordered by the predicted time of a step (:mod:`zeroshard.planner.fit_time`).
Without one they are ordered by how much they slow a step down, as far as this is known: first by
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
from pathlib import Path
from typing import Any

from zeroshard.config import load_config
from zeroshard.config.machine_file import MachineFile
from zeroshard.errors import ConfigError, UnsupportedError, UsageError
from zeroshard.planner.axes import (
    check_axis_is_free,
    refused_by_model,
    samples_by_size,
    tensor_sizes,
)
from zeroshard.planner.candidates import (
    Aim,
    Candidate,
    Fit,
    Judged,
    Strategy,
    StrategyKind,
    candidates_of,
    kinds_by_experience,
)
from zeroshard.planner.fit_time import search_by_time
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.model_source import can_checkpoint, model_source
from zeroshard.planner.plan import Plan, config_dict, explained, make_plan, mesh_of


def fit(
    model: str,
    config: Mapping[str, Any] | str | Path,
    *,
    aim: Aim,
    ranks: int,
    length: int | None = None,
    memory_gib: float | None,
    machine: MachineFile | None = None,
    target: Target | None = None,
    axes: Mapping[str, Sequence[int]] | None = None,
) -> Fit:
    """The configuration for a model that fits ``memory_gib``, with the batch of a step as it is.

    Arguments and errors as for :func:`~zeroshard.planner.plan.make_plan`. ``aim``: see :func:`search`;
    with a machine, "speed" is the smallest predicted time of a step. ``axes``: of the mesh that may
    change, as :func:`~zeroshard.planner.axes.read_axes` gives them; None: the mesh stays.

    Raises:
        UsageError: there is no limit, the model has a batch of its own, or no size of an axis is
            possible.
    """
    if memory_gib is None and (machine is None or machine.device.memory_bytes is None):
        raise UsageError(f"--fit {aim} fits a run into --memory, which is not given.")
    base = config_dict(config)
    settings = load_config(base, world_size=ranks).config
    size, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
    assert size is not None  # computed where it is not given
    if (mesh := mesh_of(settings, ranks)).pipeline > 1:
        raise UnsupportedError(
            f"the mesh is {mesh.text}, and --fit does not search with a pipeline: how many micro-batches "
            "a stage holds depends on what is searched. Plan the configurations one by one."
        )
    samples: dict[int | None, int] = {None: size * (steps or 1)}
    refused: dict[int, str] = {}
    if axes and "tensor" in axes:
        assert settings.train_batch_size is not None  # computed where it is not given
        check_axis_is_free(base)
        sizes = tensor_sizes(axes["tensor"], ranks=ranks, machine=machine)
        samples, refused = _possible(model, base, sizes, settings.train_batch_size, ranks)

    def simulated(candidate: Candidate) -> Plan:
        made = make_plan(
            model, candidate.config(base), ranks=ranks, length=length, memory_gib=memory_gib,
            checkpointing=candidate.checkpointing, machine=machine, target=target, few=True,
        )  # fmt: skip
        if made.own_batch:
            raise UsageError(
                f"--fit cannot change the batch of {model}, which returns one. Let the function return "
                "the model only; the batch is then of input_ids and labels."
            )
        return made

    with explained(model):
        able = can_checkpoint(model)
    with calm_collector():
        if machine is not None and aim == "speed":
            found = search_by_time(simulated, base, machine, samples=samples, can_checkpoint=able)
        else:
            found = search(simulated, base, aim=aim, samples=samples, can_checkpoint=able)
    return replace(found, refused=refused)


def _possible(
    model: str, base: Mapping[str, Any], sizes: Sequence[int], samples: int, ranks: int
) -> tuple[dict[int | None, int], dict[int, str]]:
    """Samples of a rank by number of tensor ranks, and why other numbers cannot be used.

    Raises:
        UsageError: none can be used.
    """
    found, refused = samples_by_size(samples, sizes, ranks)
    for size, own in list(found.items()):
        try:
            trial = Candidate(Strategy(0), False, 1, own, size).config(base)
            load_config(trial, world_size=ranks)
        except ConfigError as error:
            refused[size or 1] = str(error)
    with explained(model):
        build = model_source(model, 1, 1, sharded=False).build
        refused |= refused_by_model(build, [n for n in sizes if n not in refused])
    found = {size: own for size, own in found.items() if size not in refused}
    if not found:
        reasons = "; ".join(f"tensor {size}: {why}" for size, why in refused.items())
        raise UsageError(f"--fit-axes: no number of tensor ranks is possible. {reasons}")
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
    samples: Mapping[int | None, int],
    can_checkpoint: bool,
) -> Fit:
    """The first candidate that fits, in the order of ``aim``.

    ``simulated`` gives a candidate's plan. ``samples``: of one rank in a step, by number of tensor ranks;
    None: as the configuration says. "speed": the fastest candidate that fits, in the order of experience.
    "memory": the one with the smallest peak.
    """
    runs = _Runs(simulated, samples)
    chosen: Candidate | None = None
    looked: list[Candidate] = []
    kinds = list(kinds_by_experience(list(samples), can_checkpoint=can_checkpoint))
    for kind in kinds:
        first = runs.candidates(kind)[0]
        looked.append(first)
        if aim == "speed" and runs.plan(first).fits:
            chosen = _largest(runs, kind)
            break
    smallest = min(looked, key=lambda each: runs.plan(each).peak_nbytes)
    if aim == "memory" and runs.plan(smallest).fits:
        chosen = smallest
    larger = None
    if chosen is not None and aim == "speed":
        ways = runs.candidates(chosen.kind)
        after = next((way for way in ways if way.micro_batch > chosen.micro_batch), None)
        if after is not None:
            larger = Judged(after, runs.plan(after).peak_nbytes, None, True, "does not fit")
    best = chosen or smallest
    judged = [
        _judged(runs, own, chosen, aim, looked) for kind in kinds for own in runs.candidates(kind)
    ]
    return Fit(
        aim, chosen, runs.plan(best), best.config(base), judged, larger, runs.count,
        "The order of speed is one of experience: no machine was measured.",
    )  # fmt: skip


def _judged(
    runs: _Runs, own: Candidate, chosen: Candidate | None, aim: Aim, looked: Sequence[Candidate]
) -> Judged:
    """Why a candidate was not chosen."""
    first = replace(own, micro_batch=1, accumulation=own.micro_batch * own.accumulation)
    known = runs.known(own)
    peak_nbytes = None if known is None else known.peak_nbytes
    if own == chosen:
        why = "chosen"
    elif first not in looked:
        why = "slower in the order of experience"
    elif not runs.plan(first).fits:
        why = "does not fit" + ("" if own == first else " with one sample")
    elif chosen is None or aim == "memory":
        why = "needs more memory"
    elif own.micro_batch < chosen.micro_batch:
        why = "smaller micro-batches are slower"
    else:
        why = "does not fit, as the next larger micro-batch"
    return Judged(own, peak_nbytes, None, known is not None, why)


def _largest(runs: _Runs, kind: StrategyKind) -> Candidate:
    """The candidate with the largest micro-batch that fits. One sample does.

    The largest size is tried first: without accumulation a step holds less, so it may fit although a
    smaller one does not.
    """
    ways = runs.candidates(kind)
    if runs.plan(ways[-1]).fits:
        return ways[-1]
    too_large = bisect_right(
        ways, False, lo=1, hi=len(ways) - 1, key=lambda way: not runs.plan(way).fits
    )
    return ways[too_large - 1]


class _Runs:
    """Simulations of candidates, each once."""

    def __init__(
        self, simulated: Callable[[Candidate], Plan], samples: Mapping[int | None, int]
    ) -> None:
        self._samples = samples
        self._plans: dict[Candidate, Plan] = {}
        self._simulated = simulated

    @property
    def count(self) -> int:
        """Simulations that were made."""
        return len(self._plans)

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate."""
        if candidate not in self._plans:
            self._plans[candidate] = self._simulated(candidate)
        return self._plans[candidate]

    def known(self, candidate: Candidate) -> Plan | None:
        """The plan of a candidate, if it was simulated."""
        return self._plans.get(candidate)

    def candidates(self, kind: StrategyKind) -> list[Candidate]:
        """Those of a kind, by increasing micro-batch."""
        return candidates_of(kind, self._samples[kind.tensor])
