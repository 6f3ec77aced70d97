"""Reads what the configuration says about the mesh: the section ``parallel``, and DeepSpeed's keys."""

from __future__ import annotations

from collections.abc import Iterator

from zeroshard.config.fields import show
from zeroshard.config.schema import Config
from zeroshard.config.sections import ParallelConfig
from zeroshard.core.mesh_sources import BATCH_DIMS, Claim, MeshSource
from zeroshard.errors import ConfigError


def mesh_from_config(config: Config) -> MeshSource | None:
    """What the keys of a configuration say; None if no key says anything.

    A key of ``parallel`` counts if it is given. DeepSpeed's keys count from 2 on, because their files
    contain 0 or 1 where a feature is not used; ``data_parallel_size`` always counts.

    Raises:
        ConfigError: a key of ``expert_parallel`` asks for another router or cut experts.
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
    is_asked = section.autoep_size > 1 or "enabled" in section.model_fields_set
    if not section.enabled or not is_asked:
        return 1
    given = type(section).model_fields
    wrong = [name for name in _AS_THE_MODEL if getattr(section, name) != given[name].default]
    if wrong:
        raise ConfigError(
            "\n".join(
                f"expert_parallel.{name}: {show(getattr(section, name))} is asked for, and only "
                f"{show(given[name].default)} is possible: {_why(name)}. Leave the key out."
                for name in wrong
            )
        )
    return section.autoep_size


_AS_THE_MODEL = (
    *("expert_tensor_parallel_size", "load_balance_coeff", "top_k", "score_func", "score_apply"),
    *("route_norm", "route_scale", "routed_scaling_factor", "num_expert_groups"),
    *("num_limited_groups", "expert_activation"),
)
"""Keys of ``expert_parallel`` with which DeepSpeed computes otherwise than the model does."""


def _why(name: str) -> str:
    if name == "expert_tensor_parallel_size":
        return (
            "stacked experts of a model are not cut over tensor ranks; each holds whole experts, with "
            "the same results. For less memory let more ranks share them (autoep_size), or use MoE "
            "layers, whose experts a plan can cut"
        )
    return "routers and experts are those of the model, which sets this in its own configuration"
