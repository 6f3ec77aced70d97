"""The engine's calls that set how many samples a step takes."""

from __future__ import annotations

from typing import Any

from zeroshard.errors import UsageError


def set_train_micro_batch_size(engine: Any, micro_batch_size: int) -> None:
    """Set the samples per rank and forward. The number of accumulation steps does not change."""
    _check_between_steps(engine, "set_train_micro_batch_size", micro_batch_size)
    engine._micro_batch_size = micro_batch_size


def set_train_batch_size(engine: Any, train_batch_size: int) -> None:
    """Set the samples per step by the accumulation steps. The micro-batch does not change."""
    _check_between_steps(engine, "set_train_batch_size", train_batch_size)
    per_step = engine.train_micro_batch_size_per_gpu() * engine.dp_size
    if train_batch_size < per_step or train_batch_size % per_step:
        raise UsageError(
            f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
            f"{engine.train_micro_batch_size_per_gpu()} x world size {engine.dp_size}. Only the "
            f"number of accumulation steps can change, so give a multiple of {per_step}."
        )
    engine.accumulation.steps = train_batch_size // per_step


def _check_between_steps(engine: Any, call: str, size: int) -> None:
    engine.life.check()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"{call}({size!r}): give a whole number of samples, at least 1.")
    if engine.accumulation.divided or engine.accumulation.micro_steps:
        raise UsageError(f"{call} in the middle of a step: call it after step().")
