"""Runs test bodies that choose ZeroShard by name, on ranks that cannot import ``deepspeed``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from programs import deepspeed_is_ours, finds_deepspeed, forget, tiny  # noqa: F401
from zeroshard_testing.ranks import pool, run_ranks


def knows_deepspeed() -> bool:
    """Whether this rank could import ``deepspeed``, or has imported a package that could."""
    is_there = "deepspeed" in sys.modules or find_spec("deepspeed") is not None
    return is_there or ("accelerate.utils" in sys.modules and finds_deepspeed())


@pytest.fixture(scope="module")
def no_deepspeed_on_ranks() -> Iterator[None]:
    """Replace ranks that imported Accelerate or Transformers for tests with ``deepspeed``. These packages
    look for ``deepspeed`` only once, when they are imported."""
    if any(run_ranks(knows_deepspeed, 2, group=False)):
        pool().kill()
    yield


def by_name(body: Callable[..., Any]) -> Callable[..., Any]:
    """A body for ``on_ranks(n, group=False)``; it begins and ends without state of Accelerate."""

    @functools.wraps(body)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            with deepspeed_is_ours():  # environment variables only; deepspeed is not imported
                return body(*args, **kwargs)
        finally:
            assert "deepspeed" not in sys.modules

    return wrapped


def plain(**options: Any) -> Any:
    """An Accelerator of plain data parallelism."""
    import accelerate

    forget()
    return accelerate.Accelerator(cpu=True, **options)


def sharded(stage: int, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """An Accelerator whose models are engines."""
    from zeroshard.integrations.accelerate import Accelerator

    forget()
    zero = {"zero_optimization": {"stage": stage}, "unit_min_numel": 1}
    return Accelerator(cpu=True, config={**zero, **(config or {})}, **options)


def rows(count: int = 40) -> torch.Tensor:
    return torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(1))
