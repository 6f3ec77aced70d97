"""The mesh of a configuration: section ``parallel``, DeepSpeed's keys, and the nodes of shard groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.config.fields import show
from zeroshard.config.parse import Findings
from zeroshard.config.schema import Config
from zeroshard.config.sections import ParallelConfig
from zeroshard.config.zero_section import ZeroConfig
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import (
    BATCH_DIMS,
    Claim,
    MeshSource,
    ResolvedMesh,
    resolve_mesh,
)
from zeroshard.core.stages import STAGES
from zeroshard.errors import ConfigError

ZERO = "zero_optimization"
HPZ = f"{ZERO}.zero_hpz_partition_size"
INNER = f"{ZERO}.hierarchy.inner"
OUTER = f"{ZERO}.hierarchy.outer_reduce"
QUANTIZED = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
)
"""Keys of ZeRO++ that round what travels."""


def mesh_of_run(
    config: Config, found: Findings, sources: Sequence[MeshSource], world_size: int
) -> ResolvedMesh | None:
    """The mesh of all sources; None, with a recorded error, if there is none."""
    if any(path.startswith(_SIZES_OF_MESH) for path in found.rejected):
        return None  # its error is recorded
    try:
        ours = mesh_from_config(config)
        resolved = resolve_mesh([*([ours] if ours is not None else []), *sources], world_size)
        return with_nodes(resolved, config.zero_optimization)
    except ConfigError as error:
        found.errors.extend(str(error).split("\n"))
        return None


_SIZES_OF_MESH = (
    *("parallel", "tensor_parallel.autotp_size", "tensor_parallel.tp.tp_size"),
    *("sequence_parallel_size", "data_parallel_size", "expert_parallel"),
    *("zero_optimization.hierarchy", "zero_optimization.zero_hpz_partition_size"),
)


def with_sizes(config: Config, resolved: ResolvedMesh, found: Findings) -> Config:
    """``config`` with the sizes of the mesh in ``parallel``. Notes where those come from."""
    sizes = {dim: getattr(resolved.mesh, dim) for dim in resolved.origins}
    for dim, origin in resolved.origins.items():
        path = f"parallel.{dim}"
        if path not in found.given:
            computed = path in found.autos and origin in ("default", "derived")
            found.reasons[path] = "auto" if computed else origin
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=sizes)})


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


# ---------------------------------------------------------------- nodes


def node_size(zero: ZeroConfig) -> tuple[int, str]:
    """How many ranks a node has (1: there are no nodes), and the key that says so."""
    if zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size, HPZ
    return zero.hierarchy.inner, INNER


def shares_params_in_nodes(zero: ZeroConfig) -> bool:
    """Whether the ranks of a node share the parameters between steps, if there are nodes."""
    asked = zero.zero_hpz_partition_size > 1 or zero.hierarchy.shard_over == "hybrid"
    return asked and STAGES[zero.stage].shards_params


def keeps_node_sums(zero: ZeroConfig) -> bool:
    """Whether sums of several micro-batches pass between nodes once per step, if there are nodes.

    At stages 0 and 1 each rank adds its micro-batches itself, and there is one reduction anyway.
    """
    return zero.hierarchy.outer_reduce == "boundary" and STAGES[zero.stage].shards_grads


def with_nodes(resolved: ResolvedMesh, zero: ZeroConfig) -> ResolvedMesh:
    """The mesh with the nodes of the configuration. One node changes nothing, and one rank needs none.

    Raises:
        ConfigError: shard groups do not consist of whole nodes, or there are replicas as well, or
            something is asked of nodes and there are none.
    """
    node, key = node_size(zero)
    mesh = resolved.mesh
    if zero.zero_quantized_gradients and mesh.data_replicate > 1:
        raise ConfigError(
            f"{ZERO}.{QUANTIZED[2]}: true, with data_replicate {mesh.data_replicate}: sums over "
            f"replicas are not quantized; use {HPZ} in place of replicas, or leave one of the two out"
        )
    shares = mesh.data_shard * mesh.sequence
    _check_outer(zero, mesh)
    is_replica = zero.hierarchy.shard_over == "inner" and shares == node
    if node == 1 or is_replica or (shares in (1, node) and mesh.data_replicate == 1):
        return resolved
    if mesh.data_replicate > 1:
        raise ConfigError(
            f"{key}: {node}, with data_replicate {mesh.data_replicate}: replicas have two hops already, "
            "inside a replica and between replicas, and no parameter leaves a replica; leave one of the "
            "two keys out"
        )
    if shares % node:
        fits = [size for size in range(2, shares) if shares % size == 0]
        choice = f"use {' or '.join(map(str, fits))}, or leave it out" if fits else "leave it out"
        raise ConfigError(
            f"{key}: {node} does not divide the {shares} ranks that share parameters (mesh "
            f"{mesh.text}), so nodes would differ in size; {choice}"
        )
    if zero.hierarchy.shard_over == "inner":
        return _replicas_of_nodes(resolved, node)
    return replace(resolved, mesh=replace(mesh, node=node))


def _check_outer(zero: ZeroConfig, mesh: Mesh) -> None:
    """Refuse a second hop once per step where there is no second hop."""
    if zero.hierarchy.outer_reduce == "boundary" and node_size(zero)[0] == mesh.data_replicate == 1:
        raise ConfigError(
            f'{OUTER}: "boundary", but there are neither nodes nor replicas between which gradients '
            f"would be added; write the ranks of a node in {INNER}, or leave the key out"
        )


def _replicas_of_nodes(resolved: ResolvedMesh, node: int) -> ResolvedMesh:
    mesh: Mesh = resolved.mesh
    if node % mesh.sequence:
        raise ConfigError(
            f"{INNER}: {node} with {mesh.sequence} sequence ranks, which share parameters too; use a "
            f"multiple of {mesh.sequence}"
        )
    shard = node // mesh.sequence
    made = replace(mesh, data_replicate=mesh.data_shard // shard, data_shard=shard)
    origins = {**resolved.origins, "data_replicate": INNER, "data_shard": INNER}
    return replace(resolved, mesh=made, origins=origins)
