"""Checks what is prepared together, and completes a configuration by what an ``Accelerator`` knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader

from zeroshard.config.fields import is_auto
from zeroshard.errors import UsageError
from zeroshard.integrations.accelerate.prepared import PreparedEngine
from zeroshard.sequence import SequenceLoader

OTHERS = ("deepspeed_plugin", "deepspeed_plugins", "fsdp_plugin", "megatron_lm_plugin",
          "torch_tp_plugin")  # fmt: skip
"""Arguments of ``accelerate.Accelerator`` that give the model to another library."""


def refuse_others(arguments: dict[str, Any]) -> None:
    """Refuse a plug-in that shards the model, too.

    Raises:
        UsageError: one is among ``arguments``.
    """
    given = [name for name in OTHERS if arguments.get(name) is not None]
    if given:
        raise UsageError(
            f"Accelerator({given[0]}=...): ZeroShard shards the model itself, by its own configuration "
            "(config=). Leave that argument out."
        )


def mesh_of(config: Any) -> Any:
    """A ``ParallelismConfig`` as the mesh of an engine; None if it asks for plain data parallelism.

    Accelerate itself sets ``dp_replicate_size`` to the number of ranks if all sizes are 1.
    """
    sizes = ("dp_shard_size", "tp_size", "cp_size", "sp_size")
    return config if any(getattr(config, size, 1) != 1 for size in sizes) else None


def check_samples(engine: PreparedEngine, shares: int) -> None:
    """Check that Accelerate divides batches into as many shares as the engine's mesh. Else close it.

    Raises:
        UsageError: tensor or sequence ranks would get different samples.
    """
    if engine.dp_size != shares:
        text = engine.mesh.text
        engine.close()
        raise UsageError(
            f"the mesh of the engine is {text}, but Accelerate gives {shares} ranks samples of their "
            "own. Tell Accelerate the mesh, too: Accelerator(parallelism_config=ParallelismConfig("
            "tp_size=..., sp_size=..., dp_shard_size=...))."
        )


SAME_SAMPLES = (
    *("parallel.tensor", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
    *("parallel.pipeline", "parallel.sequence", "sequence_parallel_size"),
)
"""Keys with the size of a dimension of the mesh along which ranks train on the same samples."""


def refuse_same_samples(config: Mapping[str, Any]) -> None:
    """Refuse a configuration alone with ranks of the same samples: loaders give each rank others.

    Raises:
        UsageError: it has one of :data:`SAME_SAMPLES` above 1.
    """
    for path in SAME_SAMPLES:
        value: Any = config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int) and value > 1:
            raise UsageError(
                f"the configuration has {path}: {value}, so these ranks must train on the same samples, "
                "but the loaders of this Accelerator give each rank others. Use zeroshard.initialize() "
                "with samples by engine.dp_rank, or, for tensor or sequence ranks, Accelerator("
                "parallelism_config=ParallelismConfig(tp_size=..., sp_size=..., dp_shard_size=...))."
            )


def refuse_schedules(objects: Iterable[Any]) -> None:
    """Refuse a schedule in ``prepare`` when the configuration has one.

    Raises:
        UsageError: one is among ``objects``.
    """
    if any(isinstance(obj, torch.optim.lr_scheduler.LRScheduler) for obj in objects):
        raise UsageError(
            'prepare() was given a schedule and the configuration names one ("scheduler"). Only '
            "one can be used: remove the other."
        )


def micro_batch_of(objects: Iterable[Any], num_processes: int, *, splits: bool) -> int | None:
    """Samples per rank in a batch of the first loader among ``objects``; None if no loader knows it.

    ``splits``: a loader's batch is split over the processes (Accelerate's ``split_batches``).
    """
    for loader in objects:
        if not isinstance(loader, (DataLoader, SequenceLoader)):
            continue
        if hasattr(loader, "total_batch_size"):  # prepared already
            return int(loader.total_batch_size) // num_processes
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if isinstance(size, int):
            return size // num_processes if splits else size
    return None


def has_params(obj: Any) -> bool:
    """Whether it is a module with parameters, and not an engine."""
    is_plain = isinstance(obj, nn.Module) and not isinstance(obj, PreparedEngine)
    return is_plain and next(obj.parameters(), None) is not None


def is_new_optimizer(obj: Any) -> bool:
    """Whether it is an optimizer that was not prepared yet."""
    return isinstance(obj, torch.optim.Optimizer) and not isinstance(obj, AcceleratedOptimizer)


def pairs(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    engines: Sequence[PreparedEngine],
) -> list[tuple[nn.Module, torch.optim.Optimizer | None]]:
    """Each model with the optimizer of its parameters, or None.

    Raises:
        UsageError: an optimizer has no model in ``models``, or several; or a model has two optimizers.
    """
    of_model = [{id(param) for param in model.parameters()} for model in models]
    found: dict[int, torch.optim.Optimizer] = {}
    for optimizer in optimizers:
        params = {id(param) for group in optimizer.param_groups for param in group["params"]}
        owners = [at for at, own in enumerate(of_model) if own & params]
        name = type(optimizer).__name__
        if len(owners) > 1:
            raise UsageError(
                f"{name} has parameters of {len(owners)} models, but each engine updates its own. "
                "Make one optimizer for each, or put the models into one module."
            )
        if not owners:
            is_late = any(
                params & {id(p) for p in engine.module.parameters()} for engine in engines
            )
            why = (
                "its model was prepared before"
                if is_late
                else "its model is not among the arguments"
            )
            raise UsageError(
                f"prepare() was given {name}, but {why}: model and optimizer are sharded "
                "together. Write model, optimizer = accelerator.prepare(model, optimizer)."
            )
        if owners[0] in found:
            raise UsageError(
                f"prepare() was given {type(found[owners[0]]).__name__} and {name} for one model. "
                "An engine has one optimizer: put the parameters into param groups of one "
                "optimizer."
            )
        found[owners[0]] = optimizer
    return [(model, found.get(at)) for at, model in enumerate(models)]


# ---------------------------------------------------------------------- the configuration
#
# Pure functions on dicts. Accelerate decides accumulation, the loader's batch size, mixed precision, and
# clipping by a call of the script. If the configuration has another value, that is an error, because one
# of the two would be ignored.
MODES = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # section -> Accelerate's name
_AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}
_SCRIPT = "the Accelerator's"


@dataclass(frozen=True)
class Wishes:
    """What is known apart from the configuration.

    ``accumulation``: micro-batches per step. ``micro_batch``: samples per rank and forward; None if no
    loader knows it. ``mixed_precision``: Accelerate's name. ``names``: names of the first two in errors.
    """

    accumulation: int
    micro_batch: int | None
    mixed_precision: str
    names: tuple[str, str] = (f"{_SCRIPT} gradient_accumulation_steps", "the loader's batch size")


def precision_of(config: Mapping[str, Any]) -> str | None:
    """``"bf16"`` or ``"fp16"`` if the configuration enables it, also as autocast; else None."""
    for section, word in MODES.items():
        if _section(config, section).get("enabled") is True:
            return word
    autocast = _section(config, "torch_autocast")
    if autocast.get("enabled") is True:
        dtype = str(autocast.get("dtype", "bfloat16")).removeprefix("torch.")
        return _AUTOCAST.get(dtype, dtype)
    return None


def mixed_precision_for(config: Mapping[str, Any], asked: str | None) -> str | None:
    """The value for ``Accelerator(mixed_precision=...)``: the configuration's, else ``asked``.

    Raises:
        UsageError: both are given and differ.
    """
    named = precision_of(config)
    if named is not None and asked is not None and str(asked) != named:
        raise UsageError(
            f'mixed_precision="{asked}", but the configuration says {named}. Weights have one precision: '
            f'pass mixed_precision="{named}" (with the Trainer: TrainingArguments({named}=True)) or '
            "none, or change the configuration."
        )
    return named or asked


def completed(config: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """``config`` with the values that Accelerate knows for keys that are absent or ``"auto"``.

    Clipping is off unless the configuration has a norm: the script clips.

    Raises:
        UsageError: values disagree. The text lists all of them.
    """
    full = dict(config)
    problems = []
    known = {
        "gradient_accumulation_steps": (wishes.accumulation, wishes.names[0]),
        "train_micro_batch_size_per_gpu": (wishes.micro_batch, wishes.names[1]),
    }
    for key, (value, name) in known.items():
        given = full.get(key)
        if value is None:
            continue
        if given is None or is_auto(given):
            full[key] = value
        elif given != value:
            problems.append(f'the configuration says "{key}": {given}, but {name} is {value}')
    if full.get("gradient_clipping") is None or is_auto(full["gradient_clipping"]):
        full["gradient_clipping"] = 0.0
    problems += _set_precision(full, wishes.mixed_precision)
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu")
    if all(full.get(key) is None or is_auto(full[key]) for key in batch):
        full["train_micro_batch_size_per_gpu"] = 1  # only used to count samples
    if problems:
        raise UsageError(
            "; ".join(problems) + '. Both must agree: leave the key out, or write "auto".'
        )
    return full


def for_inference(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without the sections that need trainable parameters."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _set_precision(full: dict[str, Any], word: str) -> list[str]:
    """Enable the mode that Accelerate asks for, and disable those that are "auto". Returns problems."""
    for key, value in MODES.items():
        if value != word and is_auto(_section(full, key).get("enabled")):
            full[key] = {**_section(full, key), "enabled": False}
    if word == "no" or precision_of(full) == word:
        return []
    section = next((key for key, value in MODES.items() if value == word and key in full), word)
    if _section(full, section).get("enabled") is False:
        return [
            f'the configuration says "{section}": {{"enabled": false}}, but mixed_precision is "{word}"'
        ]
    full[section] = {**_section(full, section), "enabled": True}
    return []


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}
