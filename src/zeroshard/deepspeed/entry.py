"""``deepspeed.initialize``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import zeroshard
from zeroshard.comm.mesh_objects import mesh_from_model
from zeroshard.deepspeed import api_table, conflicts
from zeroshard.deepspeed.distributed import check_consumers
from zeroshard.deepspeed.engine import DeepSpeedEngine
from zeroshard.deepspeed.install import disagreement
from zeroshard.deepspeed.logs import log_dist, log_dist_once, logger
from zeroshard.deepspeed.optimizer import ForwardingOptimizer
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.engine.initialize import initialize as _initialize
from zeroshard.errors import ConfigError, UsageError


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, ForwardingOptimizer | None, Any, Any]:
    """:func:`zeroshard.initialize`, with an engine and an optimizer under DeepSpeed's names.

    A ``PipelineModule`` gets a :class:`PipelineEngine`, any other model a :class:`DeepSpeedEngine`.

    Raises:
        UsageError: also if a library that calls it is too old, or for ``mpu`` beside a
            ``PipelineModule``, which has its own.
    """
    check_consumers()
    is_pipeline = isinstance(model, PipelineModule)
    if is_pipeline and mpu is not None:
        raise UsageError(
            "initialize(mpu=...) beside a PipelineModule, whose topology says where each rank is. Leave "
            "mpu out, and give the topology to PipelineModule."
        )
    _tell_versions()
    came_in = conflicts.dtypes_by_name(model)
    passed = config_params or config
    mesh = conflicts.parallelism_of(config_params)
    optimizer = conflicts.without_wrapper(optimizer)
    config_params = conflicts.without_idle_schedule(config_params, optimizer)
    try:
        engine, made, loader, schedule = _initialize(
            args, model, optimizer, model_parameters, training_data, lr_scheduler, distributed_port,
            mpu, dist_init_required, collate_fn, config, mesh_param, config_params,
            mesh=mesh, plan=_plan_of(mesh, model),
            engine_type=_pipeline_engine() if is_pipeline else DeepSpeedEngine,
        )  # fmt: skip
    except ConfigError as error:
        if told := conflicts.writers(str(error), passed):
            raise ConfigError(f"{error}\n  {told}") from None
        raise
    assert isinstance(engine, DeepSpeedEngine)
    if mpu is not None:
        engine.mpu = mpu
    _tell_precision(engine, came_in)
    return engine, made, loader, schedule


def _pipeline_engine() -> type[PipelineEngine]:
    """``PipelineEngine``, or the class that the program has put into the package in its place."""
    for package in ("deepspeed", __name__.rpartition(".")[0]):
        found = vars(sys.modules[package]).get("PipelineEngine") if package in sys.modules else None
        if found in (None, PipelineEngine):
            continue
        if not isinstance(found, type) or not issubclass(found, PipelineEngine):
            raise UsageError(
                f"the program has replaced {package}.PipelineEngine by {found!r}. initialize() can build "
                "only classes that are derived from PipelineEngine."
            )
        return found
    return PipelineEngine


def _tell_versions() -> None:
    who = f"ZeroShard {zeroshard.__version__} in {next(iter(zeroshard.__path__))}"
    log_dist_once(f"DeepSpeed info: version={api_table.VERSION}, provided by {who}", ranks=[0])
    if problem := disagreement():
        logger.warning("%s", problem)


def _plan_of(mesh: Any, model: Any) -> str | None:
    """The plan that cuts a model over the tensor ranks of Accelerate's ``mesh``; None if it is cut."""
    if mesh is None or mesh.tp_size <= 1:
        return None
    is_cut = isinstance(model, nn.Module) and mesh_from_model(model) is not None
    return None if is_cut else "auto"


def _tell_precision(engine: DeepSpeedEngine, came_in: Mapping[str, torch.dtype]) -> None:
    """Warn if training loses accuracy that the parameters had when they came in."""
    if engine.basic_optimizer is None:
        return
    trained = conflicts.trained_dtypes(came_in, engine.runtime.units)
    if notice := conflicts.precision_notice(trained, engine.policy):
        log_dist(notice, ranks=[0], level=logging.WARNING)
