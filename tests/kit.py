"""Opens the engine of a test from a model, a stage, a precision and keys of the configuration."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import zeroshard

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}
"""With the weight decay of the configuration, which is 0."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(params: Any) -> torch.optim.Optimizer:
    """With torch's own weight decay."""
    return torch.optim.AdamW(params, lr=1e-2)


def config(stage: int = 0, precision: str = "fp32", **keys: Any) -> dict[str, Any]:
    """The minimal configuration. Every block of a model is a unit. ``keys`` override it."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "unit_min_numel": 1,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **keys,
        "zero_optimization": {"stage": stage, **keys.get("zero_optimization", {})},
    }


def engine(
    model: nn.Module,
    stage: int = 0,
    precision: str = "fp32",
    *,
    optimizer: Any = adamw,
    lr_scheduler: Any = None,
    model_parameters: Any = None,
    **keys: Any,
) -> zeroshard.Engine:
    """``optimizer`` may be a section of the configuration. The caller closes the engine."""
    if isinstance(optimizer, dict):
        keys, optimizer = {**keys, "optimizer": optimizer}, None
    return zeroshard.Engine(
        model,
        config=config(stage, precision, **keys),
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
    )


def outcome(body: Callable[[], object]) -> tuple[str, str, float]:
    """Class and text of the error that ended a run of ranks that wait briefly, and how long it took."""
    os.environ["ZEROSHARD_STALL_S"] = "1"
    begun_s = time.monotonic()
    try:
        body()
    except zeroshard.errors.ZeroShardError as error:
        return type(error).__name__, str(error), time.monotonic() - begun_s
    finally:
        del os.environ["ZEROSHARD_STALL_S"]
    return "", "", time.monotonic() - begun_s
