"""Configurations under DeepSpeed's names, and batch sizes that suit many world sizes.

The latter (``deepspeed.elasticity``) is arithmetic only. A run keeps its number of ranks; its checkpoints
load at any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm
from typing import Any, ClassVar

from zeroshard.comm.env import current_rank_info, local_device
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.config import Config, LoadedConfig, load_config
from zeroshard.config.fields import Section, is_auto
from zeroshard.config.parse import read_source
from zeroshard.config.zero_section import OffloadOptimizerConfig, OffloadParamConfig, ZeroConfig
from zeroshard.errors import ConfigError, UsageError
from zeroshard.precision.hardware import hardware_of


def model_config(source: Any) -> Config | None:
    """The settings that matter for building a model: without batch sizes, optimizer and schedule.

    None if ``source`` is None. Unknown keys that DeepSpeed ignores are ignored here; ``initialize``
    reports them.
    """
    if source is None or isinstance(source, Config):
        return source
    world_size = current_rank_info().world_size
    return load_config(source, world_size=world_size, for_training=False, as_deepspeed=True).config


class DeepSpeedConfigModel(Section):
    """Base class for sections that programs define.

    Fields are checked, also on assignment. Unknown names are errors. A value ``"auto"`` means the
    default, unless ``strict``.
    """

    model_config: ClassVar[Any] = {  # in addition to that of ``Section``
        "frozen": False,
        "populate_by_name": True,
        "validate_default": True,
        "validate_assignment": True,
        "use_enum_values": True,
        "arbitrary_types_allowed": True,
    }

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(
            **{name: value for name, value in data.items() if strict or not is_auto(value)}
        )


class DeepSpeedConfig:
    """A configuration that was read. Its values are attributes; the user's dict is ``_param_dict``."""

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
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


# ---------------------------------------------------------------------- elasticity


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Whether elasticity is enabled in the configuration."""
    return bool(ds_config.get("elasticity", {}).get("enabled", False))


def compute_elastic_config(
    ds_config: Any,
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """The batch size that the most world sizes can use, and these world sizes, ascending.

    A world size can use a batch size if one of ``micro_batch_sizes``, times a whole number of
    accumulation steps, times the world size gives the batch size. Candidates up to
    ``max_train_batch_size`` are each micro batch size, and their least common multiple, times the largest
    highly composite number that fits. With ``world_size`` or ``return_microbatch``, a third value is the
    largest micro batch size that suits the world size. ``target_deepspeed_version`` has no effect.

    Raises:
        ConfigError: the section is missing, disabled or not understood.
        UsageError: the world size does not suit.
    """
    section = read_source(ds_config)[0].get("elasticity")
    if not isinstance(section, Mapping) or not section.get("enabled"):
        raise ConfigError('compute_elastic_config needs "elasticity": {"enabled": true, ...}')
    micros, most = _micro_batches(section)
    low, high = int(section.get("min_gpus", 1)), int(section.get("max_gpus", 10000))
    larger = bool(section.get("prefer_larger_batch", True))
    sizes = {
        batch: _world_sizes(batch, micros, low, high)
        for batch in (base * _fitting(most // base) for base in (*micros, lcm(*micros)))
    }
    batch = max(sizes, key=lambda size: (len(sizes[size]), size if larger else -size))
    suitable = sizes[batch]
    if not world_size and not return_microbatch:
        return batch, suitable
    if world_size not in suitable:
        raise UsageError(
            f"world size {world_size} does not fit the batch size {batch}; possible world sizes: "
            f"{suitable}"
        )
    return batch, suitable, max(m for m in micros if batch // world_size % m == 0)


def _micro_batches(section: Mapping[str, Any]) -> tuple[list[int], int]:
    """The sizes of micro-batches, ascending, and the largest batch."""
    micros = sorted({int(size) for size in section.get("micro_batch_sizes", [2, 4, 6])})
    most = int(section.get("max_train_batch_size", 2000))
    if not micros or micros[0] < 1 or micros[-1] > most:
        raise ConfigError(
            f"elasticity.micro_batch_sizes: {micros} must be positive and at most "
            f"max_train_batch_size, {most}"
        )
    if int(section.get("model_parallel_size", 1)) > 1:
        raise ConfigError(
            f"elasticity.model_parallel_size: {section['model_parallel_size']}: batch sizes are computed "
            "for data-parallel ranks alone. Leave the key out, and divide the number of ranks by that "
            "of tensor ranks before you compare it with the world sizes."
        )
    return micros, most


def _world_sizes(batch: int, micros: list[int], low: int, high: int) -> list[int]:
    """World sizes at which ``batch`` is a whole number of steps of one of ``micros``."""
    counts = {batch // micro for micro in micros if batch % micro == 0}
    return [
        ranks
        for ranks in range(low, min(high, max(counts, default=0)) + 1)
        if any(count % ranks == 0 for count in counts)
    ]


def _fitting(limit: int) -> int:
    """The largest highly composite number up to ``limit``; 1 if there is none."""
    best = 1
    for number in _highly_composite():
        if number > limit:
            return best
        best = number
    return best


def _highly_composite() -> Iterator[int]:
    """Numbers with more divisors than any smaller one."""
    most, number = 0, 0
    while True:
        number += 1 if number < 12 else 12  # from 12 on all are multiples of 12
        divisors = _divisors(number)
        if divisors > most:
            most = divisors
            yield number


def _divisors(number: int) -> int:
    """The number of divisors.

    >>> _divisors(12)
    6
    """
    count, factor = 1, 2
    while factor * factor <= number:
        times = 1
        while number % factor == 0:
            number //= factor
            times += 1
        count *= times
        factor += 1
    return count * 2 if number > 1 else count
