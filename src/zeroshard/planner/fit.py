"""Searches a configuration that fits: stage, offload, activation checkpointing and micro-batch.

The batch of a step stays. With a machine, candidates are ordered by the predicted time of a step
(:mod:`zeroshard.planner.fit_time`). Without one they are ordered by how much they slow a step down, as
far as this is known: first along :data:`STRATEGIES`, of each first without activation checkpointing,
then by larger micro-batches. The peak of a strategy grows with the micro-batch. So one simulation with
one sample rules out a strategy that does not fit, and bisection finds the largest micro-batch of the
first one that does: hundreds of candidates cost about ten simulations. What is printed was simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.config import load_config
from zeroshard.config.machine_file import MachineFile
from zeroshard.errors import UsageError
from zeroshard.planner.candidates import STRATEGIES, Aim, Candidate, Fit, Judged
from zeroshard.planner.fit_time import search_by_time
from zeroshard.planner.gpu_kernels import Target
from zeroshard.planner.model_source import can_checkpoint
from zeroshard.planner.plan import Plan, config_dict, explained, make_plan


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
) -> Fit:
    """The configuration for a model that fits ``memory_gib``, with the batch of a step as it is.

    Arguments and errors as for :func:`~zeroshard.planner.plan.make_plan`. ``aim``: see :func:`search`;
    with a machine, "speed" is the smallest predicted time of a step.

    Raises:
        UsageError: there is no limit, or the model has a batch of its own.
    """
    if memory_gib is None and (machine is None or machine.device.memory_bytes is None):
        raise UsageError(f"--fit {aim} fits a run into --memory, which is not given.")
    base = config_dict(config)
    settings = load_config(base, world_size=ranks).config
    size, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
    assert size is not None  # computed where it is not given

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
    samples = size * (steps or 1)
    if machine is not None and aim == "speed":
        return search_by_time(simulated, base, machine, samples=samples, can_checkpoint=able)
    return search(simulated, base, aim=aim, samples=samples, can_checkpoint=able)


def search(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    *,
    aim: Aim,
    samples: int,
    can_checkpoint: bool,
) -> Fit:
    """The first candidate that fits, in the order of ``aim``.

    ``simulated`` gives a candidate's plan. ``samples``: of one rank in a step. "speed": the fastest
    candidate that fits, in the order of experience. "memory": the one with the smallest peak.
    """
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    runs = _Runs(simulated, samples)
    chosen: Candidate | None = None
    looked: list[Candidate] = []
    choices = (False, True) if can_checkpoint else (False,)
    kinds = [(each, on) for group in STRATEGIES for on in choices for each in group]
    for strategy, checkpointing in kinds:
        first = Candidate(strategy, checkpointing, 1, samples)
        looked.append(first)
        if aim == "speed" and runs.plan(first).fits:
            chosen = _largest(runs, first, sizes)
            break
    smallest = min(looked, key=lambda each: runs.plan(each).peak_nbytes)
    if aim == "memory" and runs.plan(smallest).fits:
        chosen = smallest
    larger = None
    if chosen is not None and aim == "speed":
        ways = runs.sizes_of(chosen, sizes)
        after = next((way for way in ways if way.micro_batch > chosen.micro_batch), None)
        if after is not None:
            larger = Judged(after, runs.plan(after).peak_nbytes, None, True, "does not fit")
    best = chosen or smallest
    judged = [
        _judged(runs, Candidate(*kind, size, samples // size), chosen, aim, looked)
        for kind in kinds
        for size in sizes
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


def _largest(runs: _Runs, first: Candidate, sizes: Sequence[int]) -> Candidate:
    """The candidate with the largest micro-batch that fits. ``first``, with one sample, does.

    The largest size is tried first: without accumulation a step holds less, so it may fit although a
    smaller one does not.
    """
    ways = list(runs.sizes_of(first, sizes))
    if runs.plan(ways[-1]).fits:
        return ways[-1]
    too_large = bisect_right(
        ways, False, lo=1, hi=len(ways) - 1, key=lambda way: not runs.plan(way).fits
    )
    return ways[too_large - 1]


class _Runs:
    """Simulations of candidates, each once."""

    def __init__(self, simulated: Callable[[Candidate], Plan], samples: int) -> None:
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

    def sizes_of(self, like: Candidate, sizes: Sequence[int]) -> Iterator[Candidate]:
        """The candidate with each size of micro-batch."""
        for size in sizes:
            yield replace(like, micro_batch=size, accumulation=self._samples // size)
