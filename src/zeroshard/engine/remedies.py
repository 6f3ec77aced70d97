"""Finds changes of a run that free device memory: pure functions of the plan's bytes.

Bytes of training states are those of the plan (:mod:`zeroshard.core.nbytes`). From what a higher stage
saves, the full parameters and gradients that it holds for a moment are taken off. What a smaller
micro-batch or checkpointing frees is a part of the activations that were measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.core.nbytes import UnitBytes, state_nbytes
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import TIERS, Tier

SLOWDOWNS = {
    "stage 2": 0.01,
    "micro-batch": 0.05,
    "stage 3": 0.15,
    "checkpointing": 0.33,
    "optimizer": 0.5,
    "parameters": 1.0,
}
"""How much longer a step takes, as a part of it. Assumed: it depends on the model and the machine."""

CHECKPOINTED = 0.5
"""The part of the activations that checkpointing frees, at least, in models of several blocks."""

_LIVE_UNITS = 3
"""Units that are full at a time, at most: the one in use, the next one, and one that is reduced."""


@dataclass(frozen=True)
class Run:
    """What is known of a run when memory is short.

    ``units``: with the bytes of this configuration. ``accumulated``: with those of one that sums several
    micro-batches. ``activation_nbytes``: that a whole forward holds. ``has_host``: the device's
    memory is not that of the host. ``can_checkpoint``: the model could recompute its activations.
    """

    units: Sequence[UnitBytes]
    accumulated: Sequence[UnitBytes]
    rank: int
    stage: int
    micro_batch: int
    accumulation: int
    activation_nbytes: int
    has_host: bool
    can_checkpoint: bool
    offloads_optimizer: bool
    offloads_params: bool


@dataclass(frozen=True)
class Remedy:
    """One change. ``line``: of the configuration as JSON, or of the program."""

    text: str
    line: str
    freed_nbytes: int
    slowdown: float


def remedies(run: Run, missing_nbytes: int, count: int = 3) -> list[Remedy]:
    """The changes that free ``missing_nbytes``, by assumed slowdown per byte; at most ``count``.

    If no change alone frees as much, those that free something.
    """
    found = [each for each in _changes(run, missing_nbytes) if each.freed_nbytes > 0]
    enough = [each for each in found if each.freed_nbytes >= missing_nbytes]
    return sorted(enough or found, key=lambda each: each.slowdown / each.freed_nbytes)[:count]


def _changes(run: Run, missing: int) -> Iterator[Remedy]:
    if run.stage < 2:
        yield _change(run, "stage 2", "stage 2", {"stage": 2}, _by_stage(run, 2))
    if run.stage < 3:
        yield _change(run, "stage 3", "stage 3", {"stage": 3}, _by_stage(run, 3))
    yield from _smaller_batch(run, missing)
    if run.can_checkpoint:
        yield Remedy(
            "activation checkpointing",
            "model.gradient_checkpointing_enable()",
            int(run.activation_nbytes * CHECKPOINTED),
            SLOWDOWNS["checkpointing"],
        )
    if not run.has_host:
        return
    to_host = {"device": "cpu"}
    states = _device_nbytes(run.units, run.stage, run.rank)
    if not run.offloads_optimizer:
        keys = {"stage": max(1, run.stage), "offload_optimizer": to_host}
        freed = states["master"] + states["optimizer"]
        yield _change(run, "the optimizer in host memory", "optimizer", keys, freed)
    if not run.offloads_params:
        keys = {"stage": 3, "offload_optimizer": to_host, "offload_param": to_host}
        freed = sum(states.values()) - states["gradients"] - _live(run, "param_nbytes")
        text = "stage 3, optimizer and parameters in host memory"
        yield _change(run, text, "parameters", keys, freed)


def _change(run: Run, text: str, kind: str, keys: Mapping[str, Any], freed: int) -> Remedy:
    line = json.dumps({"zero_optimization": dict(keys)})
    return Remedy(f"{text} instead of stage {run.stage}", line, freed, SLOWDOWNS[kind])


def _device_nbytes(units: Sequence[UnitBytes], stage: int, rank: int) -> dict[str, int]:
    planned = state_nbytes(units, STAGES[stage], rank)
    return {category: n for (category, tier), n in planned.items() if tier is Tier.DEVICE}


def _by_stage(run: Run, stage: int) -> int:
    """Bytes that another stage saves between steps, less what it holds for a moment in addition."""
    before = sum(_device_nbytes(run.units, run.stage, run.rank).values())
    after = sum(_device_nbytes(run.units, stage, run.rank).values())
    live = 0 if run.stage >= 2 else _live(run, "grad_nbytes")
    if stage == 3:
        live += _live(run, "param_nbytes")
    return before - after - live


def _live(run: Run, kind: str) -> int:
    """Bytes of the largest units in full, as many as are full at a time."""
    sizes = sorted(unit.layout.full_numel * getattr(unit, kind) for unit in run.units)
    return sum(sizes[-_LIVE_UNITS:])


def _smaller_batch(run: Run, missing: int) -> Iterator[Remedy]:
    """The largest micro-batch that frees enough, with which the batch of a step stays the same.

    If none does, one sample.
    """
    sums = 0
    if run.accumulation == 1:  # then gradients are held in forwards too
        sums = _device_nbytes(run.accumulated, run.stage, run.rank)["gradients"]
    shares = [n for n in range(2, run.micro_batch + 1) if run.micro_batch % n == 0]
    for parts in shares:
        freed = run.activation_nbytes * (parts - 1) // parts - sums
        if freed < missing and parts != shares[-1]:
            continue
        keys = {
            "train_micro_batch_size_per_gpu": run.micro_batch // parts,
            "gradient_accumulation_steps": run.accumulation * parts,
        }
        text = f"micro-batch {run.micro_batch // parts} instead of {run.micro_batch}, the same step"
        yield Remedy(text, json.dumps(keys), freed, SLOWDOWNS["micro-batch"])
        return


def is_offloaded(section: Any) -> bool:
    """Whether a section of the configuration takes state off the device."""
    return section is not None and TIERS[section.device] is not Tier.DEVICE


def accumulating(unit: UnitBytes, sum_nbytes: int) -> UnitBytes:
    """``unit`` in a run that sums micro-batches in ``sum_nbytes`` bytes per element."""
    if not unit.grad_nbytes:
        return unit
    return replace(unit, grad_nbytes=max(unit.grad_nbytes, sum_nbytes))
