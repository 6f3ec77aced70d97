"""The engine's calls that set how many samples a step takes.

The first argument of a public function is ``self``: libraries inspect the signatures of methods.
"""

from __future__ import annotations

from typing import Any

from zeroshard.errors import UsageError


def set_train_micro_batch_size(self: Any, micro_batch_size: int) -> None:
    """Set the samples per rank and forward. The number of accumulation steps does not change."""
    _check_between_steps(self, "set_train_micro_batch_size", micro_batch_size)
    self._micro_batch_size = micro_batch_size


def set_train_batch_size(self: Any, train_batch_size: int) -> None:
    """Set the samples per step by the accumulation steps. The micro-batch does not change."""
    _check_between_steps(self, "set_train_batch_size", train_batch_size)
    per_step = self.train_micro_batch_size_per_gpu() * self.dp_size
    if train_batch_size < per_step or train_batch_size % per_step:
        raise UsageError(
            f"set_train_batch_size({train_batch_size}): not a multiple of micro-batch "
            f"{self.train_micro_batch_size_per_gpu()} x world size {self.dp_size}. Only the "
            f"number of accumulation steps can change, so give a multiple of {per_step}."
        )
    self.accumulation.steps = train_batch_size // per_step


def _check_between_steps(self: Any, call: str, size: int) -> None:
    self.life.check()
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UsageError(f"{call}({size!r}): give a whole number of samples, at least 1.")
    if self.accumulation.divided or self.accumulation.micro_steps:
        raise UsageError(f"{call} in the middle of a step: call it after step().")
