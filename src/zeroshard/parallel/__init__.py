"""Parallelism inside a model: what programs reach as ``zeroshard.parallel``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.parallel.split import PipelineModel as PipelineModel
    from zeroshard.parallel.split import pipeline as pipeline

__all__ = ["PipelineModel", "pipeline"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("zeroshard.parallel.split"), name)
    raise AttributeError(f"module 'zeroshard.parallel' has no attribute {name!r}")
