"""DeepSpeed's getters of an engine, and attributes of the model that an engine forwards.

Every key of ``zero_optimization`` is a method ``zero_<key>()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from zeroshard.config.keys import get
from zeroshard.config.sections import FlopsConfig
from zeroshard.config.zero_section import ZeroConfig
from zeroshard.data.batches import loader_for
from zeroshard.engine.engine import Engine
from zeroshard.engine.engine_base import nearest_name

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
