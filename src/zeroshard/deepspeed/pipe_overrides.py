"""What a program has changed of the pipeline's instructions and schedules.

Programs derive classes, replace functions of ``PipelineEngine`` and of schedules, change
``_INSTRUCTION_MAP``, and do so before or after the engine is built. So this is asked at each
``train_batch()`` and ``eval_batch()``: some fifty comparisons of identities, a few microseconds.
"""

from __future__ import annotations

from typing import Any

from zeroshard.deepspeed import pipe_schedule
from zeroshard.deepspeed.pipe_instructions import METHODS, InstructionEngine, current
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.errors import UnsupportedError, UsageError

_METHODS = (
    *METHODS.values(),
    "_exec_schedule", "_train_schedule", "_inference_schedule", "_next_batch", "_reserve_pipe_buffers",
    "_aggregate_total_loss", "_reduce_outputs", "_bcast_pipe_scalar", "_scale_loss_by_gas",
    "_loss_stage_global_rank",
)  # fmt: skip
_PLAIN = {name: getattr(InstructionEngine, name) for name in _METHODS}
_PLAIN_MAP = dict(InstructionEngine._INSTRUCTION_MAP)
_SCHEDULES = {name: getattr(pipe_schedule, name) for name in ("TrainSchedule", "InferenceSchedule")}

_SHAPES = (
    "each message brings the shapes and dtypes of its tensors, and buffers are made from them. Override "
    "_exec_send_activations, _exec_recv_activations, _exec_send_grads or _exec_recv_grads"
)
_GRADIENTS = (
    "gradients are reduced during backward, and what is left in _exec_reduce_grads. Override that, and "
    "call it from the override"
)
UNUSED = {
    "_send_tensor_meta": _SHAPES,
    "_recv_tensor_meta": _SHAPES,
    "_allocate_zeros": _SHAPES,
    "_allocate_buffer": _SHAPES,
    "_allocate_or_extend_buffers": _SHAPES,
    "_bf16_reduce_grads": _GRADIENTS,
    "_backward_prologue_per_tensor": _GRADIENTS,
    "_take_model_step": "the update is one operation. Override _exec_optimizer_step",
    "_reentrant_activation_checkpointing": (
        "inputs need no gradient for activation checkpoints. Pass activation_checkpoint_func to "
        "PipelineModule"
    ),
}
"""Internals of DeepSpeed's engine that a program may override and that nothing calls here, and why."""


def changed(engine: InstructionEngine) -> str:
    """The first thing that the program has changed, in words; "" if there is none."""
    kind, own = type(engine), vars(engine)
    for name, plain in _PLAIN.items():
        if getattr(kind, name) is not plain or name in own:
            return name
    if engine._INSTRUCTION_MAP != _PLAIN_MAP:
        return "_INSTRUCTION_MAP"
    for name, schedule in _SCHEDULES.items():
        if current(name) is not schedule:
            return f"deepspeed.runtime.pipe.schedule.{name}"
    for schedule, name, function in pipe_schedule.PLAIN:
        if vars(schedule).get(name) is not function:
            return f"{schedule.__name__}.{name}"
    return ""


def refuse_unused(kind: type) -> None:
    """Refuse a class with an override that would not be called.

    Raises:
        UnsupportedError: it has one.
    """
    for name, why in UNUSED.items():
        if hasattr(kind, name):
            raise UnsupportedError(
                f"{kind.__name__} has a method {name} of its own, which ZeroShard does not call: {why}."
            )


def check_mpu(model: PipelineModule, mpu: Any) -> None:
    """Refuse another ``mpu`` than that of the model, whose topology says where each rank is."""
    if mpu is not None and mpu is not model.mpu():
        raise UsageError(
            "PipelineEngine(mpu=...) with another mpu than that of the model, whose topology says where "
            "each rank is. Pass mpu=model.mpu(), or leave it out."
        )
