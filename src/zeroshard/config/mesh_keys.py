"""Reads what the configuration says about the mesh: the section ``parallel``, and DeepSpeed's keys."""

from __future__ import annotations

from collections.abc import Iterator

from zeroshard.config.fields import is_off, read_number, show
from zeroshard.config.schema import Config
from zeroshard.config.sections import ParallelConfig
from zeroshard.core.mesh_sources import BATCH_DIMS, Claim, MeshSource
from zeroshard.errors import ConfigError


def mesh_from_config(config: Config) -> MeshSource | None:
    """What the keys of a configuration say; None if no key says anything.

    A key of ``parallel`` counts if it is given. DeepSpeed's keys count from 2 on, because their files
    contain 0 or 1 where a feature is not used; ``data_parallel_size`` always counts.

    Raises:
        ConfigError: ``expert_parallel.autoep_size`` is not a whole number of at least 1.
    """
    claims = (*_ours(config.parallel), *_deepspeeds(config))
    return MeshSource("the configuration", claims) if claims else None


def _ours(section: ParallelConfig) -> Iterator[Claim]:
    for dim in type(section).model_fields:
        size = getattr(section, dim)
        if dim in section.model_fields_set and size != "auto":
            yield Claim((dim,), size, f"parallel.{dim}")


def _deepspeeds(config: Config) -> Iterator[Claim]:
    tensor = config.tensor_parallel
    for dim, path, size in (
        ("tensor", "tensor_parallel.autotp_size", tensor.autotp_size),
        ("tensor", "tensor_parallel.tp.tp_size", tensor.tp.tp_size),
        ("sequence", "sequence_parallel_size", config.sequence_parallel_size),
        ("expert", "expert_parallel.autoep_size", _expert_size(config)),
    ):
        if size > 1:
            yield Claim((dim,), size, path)
    if config.data_parallel_size is not None:
        yield Claim(BATCH_DIMS, config.data_parallel_size, "data_parallel_size")


def _expert_size(config: Config) -> int:
    section = config.expert_parallel
    if is_off(section):
        return 1
    for key, neutral in (("expert_tensor_parallel_size", 1), ("load_balance_coeff", None)):
        if section.get(key, neutral) not in (neutral, None):
            raise ConfigError(
                f"expert_parallel.{key}: {show(section[key])} is asked for, and only {show(neutral)} is "
                "possible: experts are not cut over tensor ranks, and routers are those of the model. "
                "Leave the key out."
            )
    value = section.get("autoep_size", 1)
    number = read_number(value)
    if number is None or number != int(number) or number < 1:
        raise ConfigError(
            f"expert_parallel.autoep_size: must be a whole number of at least 1, not {show(value)}"
        )
    return int(number)
