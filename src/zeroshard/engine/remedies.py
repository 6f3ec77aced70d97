"""Finds changes of a run that free device memory, and the command that looks for what fits.

The changes are pure functions of the plan's bytes (:mod:`zeroshard.core.stages`). From what a higher
stage saves, the full parameters and gradients that it holds for a moment are taken off. What a smaller
micro-batch or checkpointing frees is a part of the activations that were measured, down to what the end
of a backward and the update hold without them.

The command is one of ``zeroshard plan``. It must work where it is pasted, so all that it needs besides
numbers is written into the folder of the run: the configuration, and that of a Transformers model. Names
of these files are hashes of what is in them, so that ranks share them and no later run changes them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm.env import RankInfo
from zeroshard.config import LoadedConfig
from zeroshard.config.resolve import WATCHERS
from zeroshard.core.files import write_for_this_user
from zeroshard.core.mesh import Mesh
from zeroshard.core.stages import STAGES, UnitBytes, state_nbytes
from zeroshard.core.tiers import TIERS, Tier
from zeroshard.parallel.split import PipelineModel
from zeroshard.run.run_folder import make_run_folder
from zeroshard.watchdog.settings import WatchdogSettings

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
"""The most of the activations that checkpointing frees by arithmetic. Often it frees three quarters."""

_KEPT = 0.3
"""The part that it keeps beside one block: inputs of blocks, and what is outside of them."""

TOO_MUCH = 0.02
"""The part of the peak by which a change may free less than the arithmetic says."""

_LIVE_UNITS = 3
"""Units that are full at a time, at most: the one in use, the next one, and one that is reduced."""


@dataclass(frozen=True)
class Run:
    """What is known of a run when memory is short.

    ``units``: with the bytes of this configuration. ``accumulated``: with those of one that sums several
    micro-batches. ``activation_nbytes``: that a whole forward holds. ``has_host``: the device's
    memory is not that of the host. ``checkpointing``: the line that lets the model recompute its
    activations; "" if it cannot, or does.
    ``block_nbytes``: those of one of its blocks; of a model without blocks all.
    """

    units: Sequence[UnitBytes]
    accumulated: Sequence[UnitBytes]
    rank: int
    stage: int
    micro_batch: int
    accumulation: int
    activation_nbytes: int
    has_host: bool
    checkpointing: str
    offloads_optimizer: bool
    offloads_params: bool
    block_nbytes: int


@dataclass(frozen=True)
class Remedy:
    """One change. ``line``: of the configuration as JSON, or of the program."""

    text: str
    line: str
    freed_nbytes: int
    slowdown: float


def remedies(run: Run, missing_nbytes: int, count: int = 3) -> list[Remedy]:
    """The changes that free :func:`enough_nbytes`, by assumed slowdown per byte; at most ``count``.

    If no change alone frees as much, those that free ``missing_nbytes``, or else that free something. Of
    the smaller micro-batches, the largest that frees enough.
    """
    sizes, others = (
        [each for each in found if each.freed_nbytes > 0]
        for found in (smaller_batches(run), changes(run))
    )
    for wanted in (enough_nbytes(run, missing_nbytes), missing_nbytes):
        batch = [each for each in sizes if each.freed_nbytes >= wanted][:1]
        if found := [each for each in others if each.freed_nbytes >= wanted] + batch:
            break
    else:
        found = others + sizes[-1:]
    return sorted(found, key=lambda each: each.slowdown / each.freed_nbytes)[:count]


def enough_nbytes(run: Run, missing_nbytes: int) -> int:
    """Bytes that a change must free by the arithmetic, so that ``missing_nbytes`` are free in the run."""
    return missing_nbytes + int(TOO_MUCH * _peak(run, live_units=1, block_nbytes=0))


def changes(run: Run) -> Iterator[Remedy]:
    """Every change but that of the micro-batch, also those that free nothing."""
    if run.stage < 2:
        freed = _freed(run, replace(run, stage=2))
        yield _change(run, "stage 2", "stage 2", {"stage": 2}, freed)
    if run.stage < 3:
        freed = _freed(run, replace(run, stage=3))
        yield _change(run, "stage 3", "stage 3", {"stage": 3}, freed)
    if run.checkpointing:
        kept = int(run.activation_nbytes * _KEPT) + run.block_nbytes
        kept = max(kept, int(run.activation_nbytes * (1 - CHECKPOINTED)))
        yield Remedy(
            "activation checkpointing",
            run.checkpointing,
            _freed(run, replace(run, activation_nbytes=kept)),
            SLOWDOWNS["checkpointing"],
        )
    if not run.has_host:
        return
    to_host = {"device": "cpu"}
    states = _device_nbytes(run.units, run.stage, run.rank)
    optimizer = {} if run.offloads_optimizer else {"offload_optimizer": to_host}
    if not run.offloads_optimizer:
        freed = states["master"] + states["optimizer"]
        text = "the optimizer in host memory"
        yield _change(run, text, "optimizer", {"stage": max(1, run.stage), **optimizer}, freed)
    if not run.offloads_params:
        keys = {"stage": 3, **optimizer, "offload_param": to_host}
        live = 0 if run.stage == 3 else _full(run, "param_nbytes", _LIVE_UNITS)
        freed = sum(states.values()) - states["gradients"] - live
        text = "stage 3, optimizer and parameters in host memory"
        yield _change(run, text, "parameters", keys, freed)


def _change(run: Run, text: str, kind: str, keys: Mapping[str, Any], freed: int) -> Remedy:
    line = json.dumps({"zero_optimization": dict(keys)})
    return Remedy(f"{text} instead of stage {run.stage}", line, freed, SLOWDOWNS[kind])


def _device_nbytes(units: Sequence[UnitBytes], stage: int, rank: int) -> dict[str, int]:
    planned = state_nbytes(units, STAGES[stage], rank)
    return {category: n for (category, tier), n in planned.items() if tier is Tier.DEVICE}


def _freed(run: Run, changed: Run) -> int:
    """Bytes by which the peak becomes lower: the least that it is, minus the most that it becomes."""
    # Where both reduce at once, as many units are full before as after.
    live_units = _LIVE_UNITS if run.stage >= 2 else 1
    before = _peak(run, live_units=live_units, block_nbytes=0)
    return before - _peak(changed, live_units=_LIVE_UNITS, block_nbytes=changed.block_nbytes)


def _full(run: Run, kind: str, live_units: int) -> int:
    """Bytes of the largest units in full, of so many. Those of a group are full at the same time."""
    sizes: dict[object, int] = defaultdict(int)
    for at, unit in enumerate(run.units):
        sizes[unit.group or at] += unit.layout.full_numel * getattr(unit, kind)
    return sum(sorted(sizes.values())[-live_units:])


def smaller_batches(run: Run) -> Iterator[Remedy]:
    """Smaller micro-batches with which the batch of a step stays the same, the largest first."""
    for parts in range(2, run.micro_batch + 1):
        if run.micro_batch % parts == 0:
            smaller = replace(
                run,
                units=run.accumulated,
                micro_batch=run.micro_batch // parts,
                accumulation=run.accumulation * parts,
                activation_nbytes=run.activation_nbytes // parts,
                block_nbytes=run.block_nbytes // parts,
            )
            keys = {
                "train_micro_batch_size_per_gpu": smaller.micro_batch,
                "gradient_accumulation_steps": smaller.accumulation,
            }
            text = f"micro-batch {smaller.micro_batch} instead of {run.micro_batch}, the same step"
            freed = _freed(run, smaller)
            yield Remedy(text, json.dumps(keys), freed, SLOWDOWNS["micro-batch"])


def _peak(run: Run, *, live_units: int, block_nbytes: int) -> int:
    """Device memory at the end of a forward, of a backward or in the update, whichever is the most.

    In a forward gradients are held if several micro-batches are summed. At the end of a backward they are
    complete, ``live_units`` are full and arrive from other ranks, and the first block has
    ``block_nbytes`` of activations. The update casts the gradients of a unit to the dtype of its masters.
    """
    states = _device_nbytes(run.units, run.stage, run.rank)
    gradients = states["gradients"]
    params = _full(run, "param_nbytes", _LIVE_UNITS) if run.stage == 3 else 0
    forward = params + run.activation_nbytes + (gradients if run.accumulation > 1 else 0)
    reduced = _full(run, "grad_nbytes", live_units)
    alone = all(unit.layout.num_shards == 1 for unit in run.units)
    copies = (run.stage >= 2) + (not alone)
    backward = params + gradients + block_nbytes + copies * reduced
    casts = [
        unit.master_nbytes * (unit.layout.shard_numel if run.stage else unit.layout.full_numel)
        for unit in run.units
    ]
    update = gradients + max(casts, default=0)
    return sum(states.values()) - gradients + max(forward, backward, update)


def is_offloaded(section: Any) -> bool:
    """Whether a section of the configuration takes state off the device."""
    return section is not None and TIERS[section.device] is not Tier.DEVICE


def accumulating(unit: UnitBytes, sum_nbytes: int) -> UnitBytes:
    """``unit`` in a run that sums micro-batches in ``sum_nbytes`` bytes per element."""
    if not unit.grad_nbytes:
        return unit
    return replace(unit, grad_nbytes=max(unit.grad_nbytes, sum_nbytes))


ENTRY = "plan_entry"
"""The function of a script that the command calls."""

_OF_STATES = ("lr", "momentum", "amsgrad", "centered")
"""The learning rate, and the arguments of optimizers that decide what state they have."""


@dataclass(frozen=True)
class PlannedRun:
    """What a command line says of a run.

    ``optimizer``: the one that updates; None: there is none. ``tokens``: of a sample; None: not known.
    """

    model: nn.Module
    loaded: LoadedConfig
    optimizer: torch.optim.Optimizer | None
    mesh: Mesh
    ranks: RankInfo
    on_gpu: bool
    micro_batch: int
    accumulation: int
    tokens: int | None = None


def search_lines(run: PlannedRun, memory_nbytes: int) -> list[str]:
    """The command, or what it needs first; nothing if its files cannot be written or nothing is trained.

    ``memory_nbytes``: that a rank has for tensors. Writes the files that the command names. It must not
    raise, because an error is being explained.
    """
    if run.optimizer is None:
        return []
    try:
        trust = run.loaded.config.trust
        settings = WatchdogSettings.from_config(trust).with_environment()
        folder = make_run_folder(settings.dump_dir).absolute()
        config = _written(folder, "config", config_of(run))
        why = no_name(run)
        script, has_entry = _script()
        named = script if why else _written(folder, "model", describe(run))
    except (OSError, MemoryError, TypeError, ValueError):  # the last two: a program's own objects
        return []
    words = ["zeroshard", "plan", named, "--config", config, "--ranks", str(run.ranks.world_size)]
    nodes, rest = divmod(run.ranks.world_size, run.ranks.local_world_size)
    if nodes > 1 and not rest:
        words += ["--ranks-per-node", str(run.ranks.local_world_size)]
    if run.tokens is not None and not why:
        words += ["--seq", str(run.tokens)]
    words += ["--memory", f"{memory_nbytes / 2**30:.6g}"]
    words += ["--target", "cuda"] if run.on_gpu else []
    if not why:
        head = f"To look for a configuration that fits, by simulation{_assumed(run)}, run:"
        return [head, "  " + shlex.join([*words, "--fit", "speed"])]
    head = f"To look for changes with which it fits, by simulation{_assumed(run)} ({why}), "
    if not has_entry:
        head += (
            f"define {ENTRY}() in {script}, which takes no arguments and returns the model, or the model "
            "and a batch (docs/plan.md), and "
        )
    return [head + "run:", "  " + shlex.join(words)]


def no_name(run: PlannedRun) -> str:
    """Why a configuration of Transformers does not say what the model is; "" if it does."""
    model, kind = run.model, type(run.model)
    if isinstance(model, PipelineModel):
        return "the model is a pipeline"
    section = run.loaded.config.tensor_parallel
    if run.mesh.tensor > max(section.autotp_size, section.tp.tp_size):
        return "the program cuts the model over tensor ranks"
    if getattr(sys.modules.get("transformers"), kind.__name__, None) is not kind:
        return f"{kind.__name__} is not a model of Transformers"
    if (inputs := getattr(model, "main_input_name", "")) != "input_ids":
        return f"the inputs of {kind.__name__} are {inputs}, not input_ids"
    if "labels" not in inspect.signature(kind.forward).parameters:
        return f"{kind.__name__} computes no loss"
    if not all(param.requires_grad for param in model.parameters()):
        return "some of its parameters are frozen"
    return ""


def describe(run: PlannedRun) -> dict[str, Any]:
    """The configuration of a Transformers model, with its class, its dtype and its attention."""
    config: Any = run.model.config
    found: dict[str, Any] = json.loads(config.to_json_string())
    found["architectures"] = [type(run.model).__name__]
    if attention := getattr(config, "_attn_implementation", None):
        found["attn_implementation"] = attention
    settings = run.loaded.config
    if not (settings.bf16.enabled or settings.fp16.enabled):  # then parameters keep their dtype
        dtype = next(param.dtype for param in run.model.parameters())
        found["dtype"] = str(dtype).removeprefix("torch.")
        found.pop("torch_dtype", None)
    return found


def config_of(run: PlannedRun) -> dict[str, Any]:
    """The configuration of the run, with what the program said in other ways."""
    found = {key: value for key, value in run.loaded.raw.items() if key not in WATCHERS}
    found.pop("train_batch_size", None)
    found["train_micro_batch_size_per_gpu"] = run.micro_batch
    found["gradient_accumulation_steps"] = run.accumulation
    if run.mesh.data_replicate > 1:  # the program may have given a device mesh
        found["parallel"] = {**found.get("parallel", {}), "data_replicate": run.mesh.data_replicate}
    if run.loaded.config.optimizer is None and run.optimizer is not None:
        given = run.optimizer.defaults
        params = {key: given[key] for key in _OF_STATES if given.get(key)}
        params["lr"] = float(given.get("lr", 1e-3))
        found["optimizer"] = {"type": _torch_name(run.optimizer), "params": params}
    return found


def _torch_name(optimizer: torch.optim.Optimizer) -> str:
    """The class of torch that a program's optimizer is of, or Adam."""
    names = (kind.__name__ for kind in type(optimizer).__mro__)
    return next(
        name for name in (*names, "Adam") if name != "Optimizer" and hasattr(torch.optim, name)
    )


def _assumed(run: PlannedRun) -> str:
    """In words, if an optimizer that no configuration can name is planned as another one."""
    if run.optimizer is None or run.loaded.config.optimizer is not None:
        return ""
    own, name = type(run.optimizer).__name__, _torch_name(run.optimizer)
    return "" if own == name else f" with {name} in place of {own}"


def _script() -> tuple[str, bool]:
    """The script of this process, and whether it has the function for the command."""
    main = sys.modules.get("__main__")
    path = str(getattr(main, "__file__", None) or "")
    return (path, hasattr(main, ENTRY)) if path.endswith(".py") else ("your_script.py", False)


def _written(folder: Path, what: str, content: Mapping[str, Any]) -> str:
    text = json.dumps(content, indent=1, default=str) + "\n"
    path = folder / f"plan-{what}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.json"
    part = path.with_suffix(f".{os.getpid()}")  # other ranks write the same file
    write_for_this_user(part, text)
    part.replace(path)
    return str(path)
