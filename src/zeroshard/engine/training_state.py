"""State of an engine besides the tensors of its units: what the checkpoint saver and loader get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zeroshard.precision.loss_scaler import LossScaler

IMPLEMENTATION = frozenset(
    ["params", "param_names", "foreach", "fused", "capturable", "differentiable"]
)
"""Options of a param group that choose an implementation, not a result. They are not saved."""


@dataclass(frozen=True, slots=True)
class Counters:
    """How far a run has come. ``skipped_steps`` are part of ``global_steps``."""

    global_steps: int = 0
    micro_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class TrainingState:
    """State of one engine at one moment. Objects are the engine's own: a load changes them in place.

    ``optimizer``, ``scheduler`` and ``data_loader`` may be None. ``accumulation_steps``: micro-batches
    per step. ``lost_batches``: micro-batches of an unfinished step, whose gradients are not saved.
    """

    counters: Counters
    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    groups: list[dict[str, Any]]  # the optimizer's param groups
    scaler: LossScaler
    scheduler: Any
    data_loader: Any
    accumulation_steps: int
    lost_batches: int = 0
