"""The engine that ``deepspeed.initialize`` builds.

It is :class:`zeroshard.Engine` with the methods and attributes that only programs written for DeepSpeed
use, and those of the model. Every key of ``zero_optimization`` is a method ``zero_<key>()``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import zeroshard
from zeroshard.config.keys import get
from zeroshard.config.sections import FlopsConfig
from zeroshard.config.zero_section import ZeroConfig
from zeroshard.data.batches import loader_for
from zeroshard.deepspeed import api_table, conflicts, groups
from zeroshard.deepspeed.config_model import DeepSpeedConfig
from zeroshard.deepspeed.experts import load_moe_state_dict
from zeroshard.deepspeed.logs import log_dist, logger
from zeroshard.deepspeed.monitors import MonitorMaster, SynchronizedWallClockTimer, ThroughputTimer
from zeroshard.deepspeed.optimizer import DeepSpeedZeRoOffload, ForwardingOptimizer, optimizer_of
from zeroshard.deepspeed.zero_init import mark_parameters
from zeroshard.engine.engine import Engine
from zeroshard.engine.engine_base import nearest_name
from zeroshard.errors import UnsupportedError
from zeroshard.experts.layer import layers_of
from zeroshard.watchdog.lone_reads import LoneReadCheck
from zeroshard.zero.gathered import GatheredParameters

# ---------------------------------------------------------------------- getters

_CONFIGURED = {
    "gradient_clipping": "gradient_clipping",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "communication_data_type": "communication_data_type",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "dump_state": "dump_state",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "dataloader_drop_last": "dataloader_drop_last",
    "log_level": "log_level",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "aio_config": "aio",
    "tensor_parallel_config": "tensor_parallel",
    "autotp_size": "tensor_parallel.autotp_size",
    "is_sanity_checks_enabled": "zero_optimization.enable_sanity_checks",
    "zero_gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_multi_rank_bucket_allreduce": "zero_optimization.use_multi_rank_bucket_allreduce",
    "zero_optimization_stage": "zero_optimization.stage",
    **{f"flops_profiler_{k}": f"flops_profiler.{k}" for k in FlopsConfig.model_fields},
    **{f"zero_{k}": f"zero_optimization.{k}" for k in ZeroConfig.model_fields if k != "stage"},
    **{
        "zero_" + k.removeprefix("zero_").removeprefix("stage3_"): f"zero_optimization.{k}"
        for k in ZeroConfig.model_fields
        if k.startswith(("zero_", "stage3_"))
    },
}
"""Method -> dotted key of the resolved configuration."""

Getter = Callable[..., Any]


def _configured(path: str) -> Getter:
    return lambda engine: get(engine.settings, path)


def _offloads_to(engine: Any, *devices: str) -> bool:
    section = engine.settings.zero_optimization.offload_optimizer
    return section is not None and section.device in devices


def _moments(engine: Any) -> list[Any]:
    return [group.get("momentum", group.get("betas")) for group in engine._groups]


def _optimizer_name(engine: Any) -> str | None:
    section, made = engine.settings.optimizer, engine.basic_optimizer
    if section is not None or made is None:
        return section.type if section is not None else None
    return type(made).__name__


GETTERS: dict[str, Getter] = {
    **{name: _configured(path) for name, path in _CONFIGURED.items()},
    "optimizer_name": _optimizer_name,
    "zero_optimization": lambda engine: engine.runtime.stage.number > 0,
    "zero_use_cpu_optimizer": lambda engine: _offloads_to(engine, "cpu", "nvme"),
    "zero_cpu_offload": lambda engine: _offloads_to(engine, "cpu"),
    "zero_partial_offload": lambda engine: getattr(
        engine.settings.zero_optimization.offload_optimizer, "ratio", 1.0
    ),
    "zero_optimization_partition_gradients": lambda engine: engine.runtime.stage.shards_grads,
    "zero_optimization_partition_weights": lambda engine: engine.runtime.stage.shards_params,
    "zero_nvme_offload_optimizer": lambda engine: _offloads_to(engine, "nvme"),
    "zero_legacy_stage1": lambda _engine: False,
    "postscale_gradients": lambda engine: not engine.settings.prescale_gradients,
    "initial_dynamic_scale": lambda engine: 2**engine.settings.fp16.initial_scale_power,
    "dynamic_loss_scale_args": lambda engine: {
        "init_scale": 2**engine.settings.fp16.initial_scale_power,
        "scale_window": engine.settings.fp16.loss_scale_window,
        "delayed_shift": engine.settings.fp16.hysteresis,
        "consecutive_hysteresis": engine.settings.fp16.consecutive_hysteresis,
        "min_scale": engine.settings.fp16.min_loss_scale,
    },
    "checkpoint_tag_validation_enabled": lambda engine: (
        engine.settings.checkpoint.tag_validation != "ignore"
    ),
    "checkpoint_tag_validation_fail": lambda engine: (
        engine.settings.checkpoint.tag_validation == "fail"
    ),
    "is_first_weights_partition_group": lambda engine: engine.runtime.stage.shards_params,
    "is_deepcompile_enabled": lambda _engine: False,
    "is_deepcompile_active": lambda _engine: False,
    "dynamic_loss_scale": lambda engine: engine.scales_loss and not engine.settings.fp16.loss_scale,
    "loss_scale": lambda engine: float(engine.scaler.scale),
    "get_data_types": lambda engine: (engine.policy.param, engine.policy.grad_accum),
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    "get_mom": _moments,
    "get_type": lambda engine: [type(engine.basic_optimizer).__name__ for _ in engine._groups],
    "get_data_parallel_rank": lambda engine: engine.dp_rank,
    "get_model_parallel_rank": lambda engine: engine._mesh_groups.get_model_parallel_rank(),
    "get_sequence_parallel_group": lambda engine: engine._mesh_groups.get_sequence_parallel_group(),
    "deepspeed_io": loader_for,
}
"""Method -> its answer for an engine."""


class ForwardingEngine(Engine):
    """An engine that answers as DeepSpeed's: its getters, and all that the model has (``generate``)."""

    if not TYPE_CHECKING:  # a misspelt attribute of our own code is an error for the type checker

        def __getattr__(self, name: str) -> Any:
            try:
                return nn.Module.__getattr__(self, name)
            except AttributeError:
                if name == "module" or name.startswith("__"):
                    raise
            try:
                return getattr(self.module, name)
            except AttributeError as error:
                raise AttributeError(f"{error}{nearest_name(self, name)}") from None


for _name, _getter in GETTERS.items():
    if not hasattr(Engine, _name):
        setattr(ForwardingEngine, _name, _getter)


# ---------------------------------------------------------------------- lone reads


_OWN = tuple(path + os.sep for path in (*zeroshard.__path__, *torch.__path__))
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep


class LoneReads:
    """Called before each gathering read of one engine's parameters: does this rank read alone?

    If it does, the program gets NaN instead of the values, in memory and in the files that it writes. One
    error in the log names the line that reads, and the remedy. Training goes on (ADR 0011).
    """

    def __init__(self, readers: LoneReadCheck, rank: int) -> None:
        self._readers = readers
        self._rank = rank
        self._said: set[str] = set()  # lines of the program that were reported

    def __call__(self, unit: str) -> bool:
        """Whether this rank reads ``unit`` alone. Waits for the other ranks, unless one will not come.

        A lone read is logged once for each line of the program.
        """
        why = self._readers.alone(unit)
        line = _line_of_program() if why else ""
        if why and line not in self._said:
            self._said.add(line)
            logger.error(
                "rank %d alone reads sharded parameters in %s (the first: unit %r; %s). One rank "
                "does not have all of their values, so it reads NaN, and files that it writes "
                "from them contain NaN. Training continues. To get the weights, call "
                "engine.save_pretrained(folder) or engine.save_16bit_model(folder) on every rank; "
                "or read them on every rank, or inside deepspeed.zero.GatheredParameters(params) "
                "on every rank.",
                self._rank, line, unit, why,
            )  # fmt: skip
        return bool(why)


def _line_of_program() -> str:
    """File, line and function of the innermost frame outside of ZeroShard, torch and Python's library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_library(file: str) -> bool:
    """Whether the file belongs to ZeroShard, torch or Python's standard library."""
    return file.startswith(_OWN) or (file.startswith(_PYTHON) and "-packages" not in file)


# ---------------------------------------------------------------------- the engine


class DeepSpeedEngine(ForwardingEngine):
    """An engine under DeepSpeed's names. ``optimizer``: what :mod:`.optimizer` describes."""

    _as_deepspeed = True

    def __init__(self, model: nn.Module, *, optimizer: Any = None, **options: Any) -> None:
        """As :class:`zeroshard.Engine`."""
        super().__init__(model, optimizer=_inner(optimizer), **options)
        self._mesh_groups = groups.use(self.mesh)
        self.mpu: Any = None if self.mesh.is_data_only else self._mesh_groups
        self.optimizer: ForwardingOptimizer | DeepSpeedZeRoOffload | None = optimizer_of(self)  # type: ignore[assignment]
        self.num_experts = [layer.num_experts for layer in layers_of(model).values()]
        self.has_moe_layers = bool(self.num_experts)
        self.is_compiled = False
        self.losses: Tensor | None = None
        self._short_steps = conflicts.ShortSteps()
        self.timers = SynchronizedWallClockTimer()
        self.tput_timer = ThroughputTimer(None, self.train_batch_size())
        self.monitor = MonitorMaster(self.settings, self.monitors)
        self.param_names = {param: name for name, param in model.named_parameters()}
        if self.runtime.stage.shards_params:
            mark_parameters(model.parameters())
            self.parameter_offload = DeepSpeedZeRoOffload(self)
            # Programs look there for the hooks of a model that only runs.
            if self.optimizer is None:
                self.optimizer = self.parameter_offload
            if (readers := self._watch.readers()) is not None:
                lonely = LoneReads(readers, self.global_rank)
                for unit in self.runtime.units:
                    unit.is_lone_read = lonely

    # ------------------------------------------------------------------ attributes

    @property
    def dp_world_size(self) -> int:
        """Ranks that train on different data."""
        return self.dp_size

    @property
    def mp_world_size(self) -> int:
        """Number of ranks that share each layer."""
        return self._mesh_groups.get_model_parallel_world_size()

    @property
    def data_parallel_group(self) -> Any:
        """The process group of the ranks that train on different data and hold the same parameters."""
        return self._mesh_groups.get_data_parallel_group()

    @property
    def _global_grad_norm(self) -> float | None:
        return self.get_global_grad_norm()

    @property
    def _config(self) -> DeepSpeedConfig:
        return DeepSpeedConfig.of(self.loaded)

    @property
    def inside_no_sync_ctxt(self) -> bool:
        """Whether the program is inside ``no_sync()``."""
        return self.accumulation.deferred > 0

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Milliseconds of the program's own timers (``engine.timers``)."""
        return {name: timer.elapsed(reset=False) for name, timer in self.timers.timers.items()}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError as error:
                if (row := api_table.find_member("engine", name)) is not None and not row.home:
                    raise AttributeError(api_table.reason_of(row), name=name, obj=self) from error
                raise

    # ------------------------------------------------------------------ states

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state dict, with full values at every stage.

        Sharded values are gathered when they are read. Then every rank has to read them.
        """
        into: dict[str, Any] = OrderedDict() if destination is None else destination
        state = self.module.state_dict(destination=into, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters():
                if not param.requires_grad:
                    state.pop(prefix + name, None)
        return state

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """Load ``checkpoint["module"]`` of rank 0 into the module. Every rank calls it.

        Meanwhile every rank holds the whole model.
        """
        with GatheredParameters(list(self.module.parameters()), modifier_rank=0):
            if custom_load_fn is not None:
                custom_load_fn(src=checkpoint["module"], dst=self.module)
            else:
                self.module.load_state_dict(checkpoint["module"], strict=strict)

    load_moe_state_dict = staticmethod(load_moe_state_dict)

    # ------------------------------------------------------------------ training

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """As :meth:`zeroshard.Engine.backward`."""
        self._short_steps.saw_backward(divides=scale_wrt_gas)
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """As :meth:`zeroshard.Engine.step`."""
        if notice := self._short_steps.saw_step(self.accumulation):
            log_dist(notice, ranks=[0], level=logging.WARNING)
        super().step(lr_kwargs)

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """``torch.compile`` of the module, in place.

        Raises:
            UnsupportedError: DeepCompile's ``schedule``, or compiled autograd. Neither works with hooks
                that free memory.
        """
        if schedule is not None or compiled_autograd_enabled:
            raise UnsupportedError(
                "engine.compile(): schedule and compiled_autograd_enabled belong to DeepCompile. Leave "
                "them out; the module itself is compiled."
            )
        self.module.compile(**{"backend": backend, **(compile_kwargs or {})})
        self.is_compiled = True

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """As :meth:`no_sync`: stages 0 and 1 reduce once, later; stages 2 and 3 reduce every backward."""
        with self.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Nothing: gradients are reduced during backward."""

    def clip_fp32_gradients(self) -> None:
        """Nothing: clipping is part of the update."""

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Not available: change batches in ``collate_fn``.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "set_data_post_process_func is for DeepSpeed's curriculum loader, which ZeroShard "
            "does not have. Change batches in collate_fn."
        )


def _inner(optimizer: Any) -> Any:
    return optimizer.optimizer if isinstance(optimizer, ForwardingOptimizer) else optimizer
