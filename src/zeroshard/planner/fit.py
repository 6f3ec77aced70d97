"""Searches a configuration that fits: stage, offload, activation checkpointing and micro-batch.

The batch of a step stays. Candidates are ordered by how much they slow a step down, as far as this is
known without a machine: first along :data:`STRATEGIES`, of each first without activation checkpointing,
then by larger micro-batches. The peak of a strategy grows with the micro-batch. So one simulation with
one sample rules out a strategy that does not fit, and bisection finds the largest micro-batch of the
first one that does: hundreds of candidates cost about ten simulations. What is printed was simulated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

from zeroshard.config import load_config
from zeroshard.errors import UsageError
from zeroshard.planner.model_source import can_checkpoint
from zeroshard.planner.plan import Plan, config_dict, explained, limit_of, make_plan

Aim: TypeAlias = Literal["speed", "memory"]


@dataclass(frozen=True)
class Strategy:
    """A stage of ZeRO, and what is offloaded to host memory."""

    stage: int
    optimizer: bool = False
    params: bool = False

    @property
    def text(self) -> str:
        """In words."""
        away = ["optimizer"] * self.optimizer + ["parameters"] * self.params
        return f"stage {self.stage}" + (f", {' and '.join(away)} offloaded" if away else "")


STRATEGIES = (
    (Strategy(1), Strategy(2)),
    (Strategy(2, optimizer=True),),
    (Strategy(3),),
    (Strategy(3, optimizer=True),),
    (Strategy(3, optimizer=True, params=True),),
)
"""From the fastest to the one that needs the least device memory. Stages 1 and 2 are as fast."""


@dataclass(frozen=True)
class Candidate:
    """One configuration. ``micro_batch`` times ``accumulation`` samples are a rank's part of a step."""

    strategy: Strategy
    checkpointing: bool
    micro_batch: int
    accumulation: int

    @property
    def text(self) -> str:
        """In words."""
        how = "with" if self.checkpointing else "without"
        return (
            f"{self.strategy.text}, {how} activation checkpointing, micro-batch {self.micro_batch} x "
            f"accumulation {self.accumulation}"
        )

    def config(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """``base`` with this candidate's keys. Offload sections that ``base`` has are used."""
        zero = dict(base.get("zero_optimization") or {})
        wanted = {
            "offload_optimizer": self.strategy.optimizer,
            "offload_param": self.strategy.params,
        }
        own = {key: zero.pop(key, None) for key in wanted}
        for key, on in wanted.items():
            if on:
                given = own[key] or {}
                is_away = given.get("device") not in (None, "none")
                zero[key] = given if is_away else {**given, "device": "cpu"}
        others = {key: value for key, value in base.items() if key != "train_batch_size"}
        return {  # train_batch_size follows from micro-batch, accumulation and ranks
            **others,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {**zero, "stage": self.strategy.stage},
        }


@dataclass(frozen=True)
class Group:
    """The candidates of one strategy, with or without checkpointing.

    ``largest``: the largest micro-batch that fits, or 1 if none does. ``peak_nbytes``: its peak; None:
    the group was not looked at, because a faster one fits.
    """

    strategy: Strategy
    checkpointing: bool
    largest: Candidate
    peak_nbytes: int | None
    fits: bool


@dataclass(frozen=True)
class Fit:
    """The result of a search. ``chosen``: None if nothing fits; then ``plan`` is the smallest peak.

    ``larger``: the next larger micro-batch of the chosen strategy and its peak, which does not fit; None:
    the chosen one is the largest, or the aim is "memory".
    """

    aim: Aim
    chosen: Candidate | None
    plan: Plan
    config: Mapping[str, Any]
    groups: Sequence[Group]
    larger: tuple[Candidate, int] | None
    count: int
    simulations: int

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "aim": self.aim,
            "chosen": None if self.chosen is None else self.chosen.text,
            "checkpointing": self.chosen is not None and self.chosen.checkpointing,
            "config": dict(self.config),
            "next_larger": None if self.larger is None else {
                "micro_batch": self.larger[0].micro_batch, "peak_nbytes": self.larger[1]
            },
            "candidates": self.count,
            "simulations": self.simulations,
            "groups": [
                {"strategy": g.strategy.text, "checkpointing": g.checkpointing, "fits": g.fits,
                 "micro_batch": g.largest.micro_batch, "peak_nbytes": g.peak_nbytes}
                for g in self.groups
            ],
            "plan": self.plan.as_dict(),
        }  # fmt: skip


def fit(
    model: str,
    config: Mapping[str, Any] | str | Path,
    *,
    aim: Aim,
    ranks: int,
    length: int | None = None,
    memory_gib: float | None,
) -> Fit:
    """The configuration for a model that fits ``memory_gib``, with the batch of a step as it is.

    Arguments and errors as for :func:`~zeroshard.planner.plan.make_plan`. ``aim``: see :func:`search`.

    Raises:
        UsageError: there is no limit, or the model has a batch of its own.
    """
    if memory_gib is None:
        raise UsageError(f"--fit {aim} fits a run into --memory, which is not given.")
    limit_nbytes = limit_of(memory_gib)
    base = config_dict(config)
    settings = load_config(base, world_size=ranks).config
    size, steps = settings.train_micro_batch_size_per_gpu, settings.gradient_accumulation_steps
    assert size is not None  # computed where it is not given

    def simulated(candidate: Candidate) -> Plan:
        made = make_plan(
            model,
            candidate.config(base),
            ranks=ranks,
            length=length,
            memory_gib=memory_gib,
            checkpointing=candidate.checkpointing,
        )
        if made.own_batch:
            raise UsageError(
                f"--fit cannot change the batch of {model}, which returns one. Let the function return "
                "the model only; the batch is then of input_ids and labels."
            )
        return made

    with explained(model):
        able = can_checkpoint(model)
    return search(
        simulated, base, aim=aim, samples=size * (steps or 1), limit_nbytes=limit_nbytes,
        can_checkpoint=able,
    )  # fmt: skip


def search(
    simulated: Callable[[Candidate], Plan],
    base: Mapping[str, Any],
    *,
    aim: Aim,
    samples: int,
    limit_nbytes: int,
    can_checkpoint: bool,
) -> Fit:
    """The first candidate that fits, in the order of ``aim``.

    ``simulated`` gives a candidate's plan. ``samples``: of one rank in a step. "speed": the fastest
    candidate that fits. "memory": the one with the smallest peak.
    """
    sizes = [size for size in range(1, samples + 1) if samples % size == 0]
    runs = _Runs(simulated, samples)
    groups: list[Group] = []
    chosen: Candidate | None = None
    choices = (False, True) if can_checkpoint else (False,)
    kinds = [(each, on) for group in STRATEGIES for on in choices for each in group]
    for strategy, checkpointing in kinds:
        first = Candidate(strategy, checkpointing, 1, samples)
        if chosen is not None and aim == "speed":
            groups.append(Group(strategy, checkpointing, first, None, fits=False))
            continue
        largest, fits = first, runs.peak_nbytes(first) <= limit_nbytes
        if fits and aim == "speed":
            chosen = largest = _largest(runs, first, sizes, limit_nbytes)
        groups.append(Group(strategy, checkpointing, largest, runs.peak_nbytes(largest), fits))
    looked = [group for group in groups if group.peak_nbytes is not None]
    smallest = min(looked, key=lambda group: group.peak_nbytes or 0)
    if aim == "memory" and smallest.fits:
        chosen = smallest.largest
    best = chosen or smallest.largest
    larger = None
    if chosen is not None and aim == "speed":
        ways = runs.sizes_of(chosen, sizes)
        larger = next((way for way in ways if way.micro_batch > chosen.micro_batch), None)
    return Fit(
        aim,
        chosen,
        runs.plan(best),
        best.config(base),
        groups,
        None if larger is None else (larger, runs.peak_nbytes(larger)),
        len(kinds) * len(sizes),
        runs.count,
    )


def _largest(runs: _Runs, first: Candidate, sizes: Sequence[int], limit_nbytes: int) -> Candidate:
    """The candidate with the largest micro-batch that fits. ``first``, with one sample, does.

    The largest size is tried first: without accumulation a step holds less, so it may fit although a
    smaller one does not.
    """
    ways = list(runs.sizes_of(first, sizes))
    if runs.peak_nbytes(ways[-1]) <= limit_nbytes:
        return ways[-1]
    too_large = bisect_right(ways, limit_nbytes, lo=1, hi=len(ways) - 1, key=runs.peak_nbytes)
    return ways[too_large - 1]


class _Runs:
    """Simulations of candidates, each once."""

    def __init__(self, simulated: Callable[[Candidate], Plan], samples: int) -> None:
        self._samples = samples
        self.count = 0

        @cache
        def plan(candidate: Candidate) -> Plan:
            self.count += 1
            return simulated(candidate)

        self._plan = plan

    def plan(self, candidate: Candidate) -> Plan:
        """The plan. Micro-batches after the second hold nothing more, so at most two are simulated."""
        return self._plan(replace(candidate, accumulation=min(candidate.accumulation, 2)))

    def peak_nbytes(self, candidate: Candidate) -> int:
        """The peak of a candidate."""
        return self.plan(candidate).peak_nbytes

    def sizes_of(self, like: Candidate, sizes: Sequence[int]) -> Iterator[Candidate]:
        """The candidate with each size of micro-batch."""
        for size in sizes:
            yield replace(like, micro_batch=size, accumulation=self._samples // size)
