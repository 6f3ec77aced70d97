"""Parallelism inside a model: what programs reach as ``zeroshard.parallel``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.experts.layer import MoE as MoE
    from zeroshard.parallel.cut import pipeline as pipeline
    from zeroshard.parallel.split import PipelineModel as PipelineModel
    from zeroshard.parallel.tensor_plan import tensor_parallel as tensor_parallel
    from zeroshard.parallel.tensor_sums import (
        vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
    )

_HOMES = {
    "MoE": "experts.layer",
    "PipelineModel": "parallel.split",
    "pipeline": "parallel.cut",
    "tensor_parallel": "parallel.tensor_plan",
    "vocab_parallel_cross_entropy": "parallel.tensor_sums",
}
"""Public name -> the module that has it. Importing the package alone loads nothing."""

__all__ = [*_HOMES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"zeroshard.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'zeroshard.parallel' has no attribute {name!r}")
