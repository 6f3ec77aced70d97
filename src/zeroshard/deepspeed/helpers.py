"""Small utilities that programs import from DeepSpeed."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.env import local_device
from zeroshard.config import LoadedConfig, load_config
from zeroshard.config.zero_section import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from zeroshard.deepspeed.logs import logger
from zeroshard.device.choice import current_ops
from zeroshard.errors import UnsupportedError
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.zero.access import safe_get_full_grad, safe_set_full_grad
from zeroshard.zero.sharded_parameter import in_order


class OnDevice:
    """Modules created inside have parameters on ``device`` and in ``dtype``; ``meta`` has no memory."""

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._before = torch.get_default_dtype()
        if self.dtype.is_floating_point:
            torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)


class DeepSpeedConfig:
    """A configuration that was read. Its values are attributes; the user's dict is ``_param_dict``."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        from zeroshard.comm.env import current_rank_info
        from zeroshard.comm.mesh_objects import mesh_sources
        from zeroshard.precision.hardware import hardware_of

        self._loaded = load_config(
            config,
            world_size=current_rank_info().world_size,
            mesh_sources=mesh_sources(mesh=mesh_device, mpu=mpu),
            as_deepspeed=True,
            hardware=lambda: hardware_of(local_device()),
        )
        self._param_dict = self._loaded.raw

    @classmethod
    def of(cls, loaded: LoadedConfig) -> DeepSpeedConfig:
        """The configuration that an engine has read."""
        made = cls.__new__(cls)
        made._loaded, made._param_dict = loaded, loaded.raw
        return made

    @property
    def zero_config(self) -> ZeroConfig:
        """The section ``zero_optimization``."""
        return self._loaded.config.zero_optimization

    @property
    def pipeline(self) -> dict[str, Any]:
        """The section ``pipeline``, by key."""
        return self._loaded.config.pipeline.model_dump()

    def __getattr__(self, name: str) -> Any:
        if name == "_loaded" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loaded.config, name)


DeepSpeedZeroConfig = ZeroConfig
DeepSpeedZeroOffloadParamConfig = OffloadParamConfig
DeepSpeedZeroOffloadOptimizerConfig = OffloadOptimizerConfig


class RepeatingLoader:
    """An iterator over a loader that starts again when the loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by ``update_func(grad, param)``. Collective."""
    for param in in_order(param_list):
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Show calls of the function as a range in NVIDIA's profiler."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with current_ops().profiler_range(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


def parse_range_list(rng: str) -> list[int]:
    """The numbers in a list such as ``0-3,8``, in order.

    Raises:
        ValueError: the ranges are not ascending, or overlap.

    >>> parse_range_list("0-2,5")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for part in rng.split(","):
        first, _, last = part.partition("-")
        cores = range(int(first), int(last or first) + 1)
        if not cores or (found and cores[0] <= found[-1]):
            raise ValueError(f"{rng!r}: give ranges in ascending order that do not overlap")
        found += cores
    return found


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Move the tensors of a nested structure to another device. Containers keep their type."""
    if criterion_func(item):
        return item.to(device)
    return _mapped(item, lambda inner: move_to_device(inner, device, criterion_func))


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copies of the tensors of a nested structure, each with its own storage.

    ``torch.save`` would write the whole storage that a view belongs to.
    """
    if torch.is_tensor(item):
        moved = item.detach().to(device)
        return moved.clone() if moved.data_ptr() == item.data_ptr() else moved
    return _mapped(item, lambda inner: clone_tensors_for_torch_save(inner, device))


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return type(item)((key, change(inner)) for key, inner in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(change, item))
    return type(item)(map(change, item)) if isinstance(item, (list, tuple)) else item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on this rank's device and host, if ``force``."""
    if not force:
        return
    in_use = current_ops().memory_in_use()
    if in_use is not None:
        used, most = in_use
        message = f"{message}: device {gib(used)}, at most {gib(most)}"
    logger.log(logging.INFO, "%s; %s", message, host_limits().in_words())


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for ordinary gradients. An engine clips its own gradients.

    Raises:
        UnsupportedError: ``mpu`` has several model-parallel ranks, over which the norm would be added.
    """
    ranks = 1 if mpu is None else mpu.get_model_parallel_world_size()
    if ranks > 1:
        raise UnsupportedError(
            f"clip_grad_norm_(mpu=...) with {ranks} model-parallel ranks: which of these gradients are "
            "parts, and which are copies, is not known here. Pass the parameters of an engine without "
            "mpu, whose norm counts each element once, or use the key gradient_clipping."
        )
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Sequence[float]) -> float:
    """The 2-norm of a list of norms."""
    return math.sqrt(sum(norm**2.0 for norm in norm_list))


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Create the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
