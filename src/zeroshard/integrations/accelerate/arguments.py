"""Checks the objects that are prepared together, and matches optimizers with models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.utils.data import DataLoader

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
