"""Describes a run for another process: its model without values, the shapes of its batch, its keys.

The other process simulates changes of the run (:mod:`zeroshard.planner.failed_run`). It needs a process
of its own, since this one takes part in a process group and may have no memory left.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.comm.env import current_rank_info
from zeroshard.config import LoadedConfig
from zeroshard.config.resolve import WATCHERS
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.pickled_model import NotDescribable, pickled
from zeroshard.parallel.schedules import settled_after
from zeroshard.parallel.split import PipelineModel
from zeroshard.parallel.whole_copy import Plan, plan_of
from zeroshard.zero.input_shapes import Unknown


@dataclass(frozen=True)
class RunDescription:
    """What a simulation of a run needs.

    ``model``: the whole module, or a function that makes it; ``optimizer``: its class and its defaults;
    None if the configuration names it. Both are :func:`pickled`. ``batch``: inputs and labels of a
    micro-batch, as :func:`~zeroshard.zero.input_shapes.shapes_of` gives them. ``enough``: micro-batches
    of a step after which each holds what the one before held; None: not known. ``plan``: cuts the model
    over tensor ranks. ``path``: where modules are found.
    """

    model: bytes
    optimizer: bytes | None
    batch: tuple[Any, Any]
    config: Mapping[str, Any]
    micro_batch: int
    accumulation: int
    enough: int | None
    mesh: Mesh
    plan: Plan | None
    rank: int
    ranks_per_node: int
    on_gpu: bool
    dtype: torch.dtype
    path: tuple[str, ...]


def describe(engine: Any) -> RunDescription:
    """The run of an engine.

    Raises:
        NotDescribable: it has no optimizer; this rank does not know the batch, or the batch holds unknown
            objects; or a part of the model cannot be pickled.
    """
    module = engine.module
    is_pipeline = isinstance(module, PipelineModel)
    batch = module.batch_shapes if is_pipeline else _last_batch(engine)
    if batch is None:
        raise NotDescribable("this rank of the pipeline got no data")
    unknown = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Unknown)]
    if unknown:
        raise NotDescribable(f"the model got an object of class {unknown[0].kind}")
    updates = engine.runtime.optimizer  # engine.optimizer may be the one that DeepSpeed's API shows
    optimizer = None if updates is None else updates.inner
    run = replace(
        described(module, engine.loaded, optimizer, engine.mesh, engine.device),
        batch=batch,
        micro_batch=engine.train_micro_batch_size_per_gpu(),
        accumulation=engine.accumulation.steps,
    )
    transport = engine.transport.partition(":")[0]
    if engine.mesh.is_data_only and transport in ("shm", "p2p", "stock"):
        # if the configuration leaves the choice to the engine
        run = replace(run, config={**run.config, "transport": transport})
    return run


def described(
    model: nn.Module,
    loaded: LoadedConfig,
    optimizer: torch.optim.Optimizer | None,
    mesh: Mesh,
    device: torch.device,
) -> RunDescription:
    """A run whose engine may not exist yet. It has no batch.

    Raises:
        NotDescribable: it has no optimizer, or a part of the model cannot be pickled.
    """
    if optimizer is None:
        raise NotDescribable("it has no optimizer")
    settings, info = loaded.config, current_rank_info()
    enough: int | None = 2
    if isinstance(model, PipelineModel):
        enough = settled_after(model.schedule, len(model.stages), mesh.pipeline)
    assert settings.train_micro_batch_size_per_gpu is not None  # computed where it is not given
    return RunDescription(
        model=model.as_built() if isinstance(model, PipelineModel) else pickled(model),
        optimizer=None if settings.optimizer else pickled((type(optimizer), optimizer.defaults)),
        batch=((), None),
        config={key: value for key, value in loaded.raw.items() if key not in WATCHERS},
        micro_batch=settings.train_micro_batch_size_per_gpu,
        accumulation=settings.gradient_accumulation_steps or 1,
        enough=enough,
        mesh=mesh,
        plan=plan_of(model) if mesh.tensor > 1 else None,
        rank=info.rank,
        ranks_per_node=info.local_world_size,
        on_gpu=device.type != "cpu",
        dtype=torch.get_default_dtype(),
        path=tuple(sys.path),
    )


def _last_batch(engine: Any) -> tuple[Any, None]:
    """The inputs of the last forward: a tuple, or a mapping by name."""
    if engine._hooks.input_shapes is None:
        raise NotDescribable("no forward with gradients has begun")
    args, kwargs = engine._hooks.input_shapes
    if not kwargs:
        return args, None
    names = inspect.signature(engine.module.forward).parameters
    return {**dict(zip(names, args, strict=False)), **kwargs}, None
