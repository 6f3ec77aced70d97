"""Makes the command line of ``zeroshard plan`` that looks for a configuration with which a run fits.

A line must work where it is pasted, so all that the command needs besides numbers is written into the
folder of the run: the configuration, and that of a Transformers model. Names of these files are hashes of
what is in them, so that ranks share them and no later run changes them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm.env import RankInfo
from zeroshard.config import LoadedConfig
from zeroshard.config.loaded import WATCHERS
from zeroshard.core.files import write_for_this_user
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.split import PipelineModel
from zeroshard.run.run_folder import make_run_folder
from zeroshard.watchdog.settings import WatchdogSettings

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
