"""Which small questions do programs written for DeepSpeed ask an engine?

One table from the method's name to its answer; ``Engine`` looks here for what it does not have.
Every key of ``zero_optimization`` is a method ``zero_<key>()``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zeroshard.config.keys import get
from zeroshard.config.schema import ZeroConfig
from zeroshard.engine.data import loader_for

_CONFIGURED = {
    "gradient_clipping": "gradient_clipping",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "optimizer_name": "optimizer.type",
    "optimizer_params": "optimizer.params",
    "scheduler_name": "scheduler.type",
    "scheduler_params": "scheduler.params",
    "communication_data_type": "communication_data_type",
    "prescale_gradients": "prescale_gradients",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "dump_state": "dump_state",
    "zero_optimization_stage": "zero_optimization.stage",
    **{f"zero_{k}": f"zero_optimization.{k}" for k in ZeroConfig.model_fields if k != "stage"},
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


GETTERS: dict[str, Getter] = {
    **{name: _configured(path) for name, path in _CONFIGURED.items()},
    "zero_optimization": lambda engine: engine.runtime.stage.number > 0,
    "zero_use_cpu_optimizer": lambda engine: _offloads_to(engine, "cpu", "nvme"),
    "zero_cpu_offload": lambda engine: _offloads_to(engine, "cpu"),
    "zero_partial_offload": lambda engine: getattr(
        engine.settings.zero_optimization.offload_optimizer, "ratio", 1.0
    ),
    "zero_optimization_partition_gradients": lambda engine: engine.runtime.stage.shards_grads,
    "zero_optimization_partition_weights": lambda engine: engine.runtime.stage.shards_params,
    "dynamic_loss_scale": lambda engine: engine.scales_loss and not engine.settings.fp16.loss_scale,
    "loss_scale": lambda engine: float(engine.scaler.scale),
    "get_data_types": lambda engine: (engine.policy.param, engine.policy.grad_accum),
    "get_batch_info": lambda engine: (
        engine.train_batch_size(),
        engine.train_micro_batch_size_per_gpu(),
        engine.gradient_accumulation_steps(),
    ),
    "get_mom": _moments,
    "get_type": lambda engine: [type(engine.optimizer).__name__ for _ in engine._groups],
    "get_data_parallel_rank": lambda engine: engine.global_rank,
    "get_model_parallel_rank": lambda _engine: 0,
    "get_sequence_parallel_group": lambda _engine: None,
    "deepspeed_io": loader_for,
}
"""Method -> its answer for an engine."""
