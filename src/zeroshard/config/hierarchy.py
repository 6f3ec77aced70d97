"""Reads the nodes of shard groups from the configuration: ``hierarchy``, and the keys of ZeRO++."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zeroshard.config.schema import ZeroConfig
from zeroshard.core.mesh import Mesh
from zeroshard.core.mesh_sources import ResolvedMesh
from zeroshard.core.stages import STAGES
from zeroshard.errors import ConfigError

_ZERO = "zero_optimization"
QUANTIZED = (
    *("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
)
"""Keys of ZeRO++ that round what travels."""

_HPZ = f"{_ZERO}.zero_hpz_partition_size"
_INNER = f"{_ZERO}.hierarchy.inner"
_OUTER = f"{_ZERO}.hierarchy.outer_reduce"


def node_size(zero: ZeroConfig) -> tuple[int, str]:
    """How many ranks a node has (1: there are no nodes), and the key that says so."""
    if zero.zero_hpz_partition_size > 1:
        return zero.zero_hpz_partition_size, _HPZ
    return zero.hierarchy.inner, _INNER


def shares_params_in_nodes(zero: ZeroConfig) -> bool:
    """Whether the ranks of a node share the parameters between steps, if there are nodes."""
    asked = zero.zero_hpz_partition_size > 1 or zero.hierarchy.shard_over == "hybrid"
    return asked and STAGES[zero.stage].shards_params


def keeps_node_sums(zero: ZeroConfig) -> bool:
    """Whether sums of several micro-batches pass between nodes once per step, if there are nodes.

    At stages 0 and 1 each rank adds its micro-batches itself, and there is one reduction anyway.
    """
    return zero.hierarchy.outer_reduce == "boundary" and STAGES[zero.stage].shards_grads


def quantized_contradictions(zero: ZeroConfig) -> Iterator[str]:
    """One line for each key of ZeRO++ that rounds, and has nothing to round or rounds what is exact."""
    param = zero.offload_param
    if zero.zero_quantized_gradients and zero.hierarchy.outer_reduce == "boundary":
        yield (
            f'{_OUTER}: "boundary" with {QUANTIZED[2]}: true, but sums that wait for the last '
            "micro-batch are not quantized; leave one of the two out"
        )
    for name in QUANTIZED:
        if not getattr(zero, name):
            continue
        if not STAGES[zero.stage].shards_params:
            yield (
                f"{_ZERO}.{name}: true at stage {zero.stage}, but only the gathers and reductions of "
                "stage 3 can be quantized; use stage 3, or leave the key out"
            )
        elif param is not None and param.device != "none" and name != QUANTIZED[2]:
            yield (
                f'{_ZERO}.{name}: true, but offload_param.device "{param.device}" keeps the parameters '
                "away from the device that would quantize them; leave one of the two out"
            )


def hierarchy_contradictions(zero: ZeroConfig) -> Iterator[str]:
    """One line for each contradiction among the keys of nodes, whatever the number of ranks."""
    hpz, inner, over = (
        zero.zero_hpz_partition_size, zero.hierarchy.inner, zero.hierarchy.shard_over,
    )  # fmt: skip
    if hpz > 1 and not STAGES[zero.stage].shards_params:
        yield (
            f"{_HPZ}: {hpz} at stage {zero.stage}, where every rank has all parameters and backward "
            f"gathers none; use stage 3, or leave the key out ({_INNER} gives collectives two hops at "
            "every stage)"
        )
    if hpz > 1 and inner not in (1, hpz):
        yield f"{_HPZ}: {hpz}, but {_INNER} is {inner}; both are the ranks of a node: keep one of them"
    if hpz > 1 and over == "inner":
        yield (
            f'{_HPZ}: {hpz} with hierarchy.shard_over "inner", where no parameter leaves its node; keep '
            "one of the two keys"
        )
    if max(hpz, inner) == 1 and over != "all":
        yield (
            f'{_ZERO}.hierarchy.shard_over: "{over}" needs the number of ranks of a node; write it in '
            f"{_INNER}"
        )
    param = zero.offload_param
    if shares_params_in_nodes(zero) and param is not None and param.device != "none":
        yield (
            f"{node_size(zero)[1]}: the second shards stay on the device, but offload_param.device "
            f'"{param.device}" moves the parameters away from it; leave one of them out'
        )


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
            f"{_ZERO}.{QUANTIZED[2]}: true, with data_replicate {mesh.data_replicate}: sums over "
            f"replicas are not quantized; use {_HPZ} in place of replicas, or leave one of the two out"
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
            f'{_OUTER}: "boundary", but there are neither nodes nor replicas between which gradients '
            f"would be added; write the ranks of a node in {_INNER}, or leave the key out"
        )


def _replicas_of_nodes(resolved: ResolvedMesh, node: int) -> ResolvedMesh:
    mesh: Mesh = resolved.mesh
    if node % mesh.sequence:
        raise ConfigError(
            f"{_INNER}: {node} with {mesh.sequence} sequence ranks, which share parameters too; use a "
            f"multiple of {mesh.sequence}"
        )
    shard = node // mesh.sequence
    made = replace(mesh, data_replicate=mesh.data_shard // shard, data_shard=shard)
    origins = {**resolved.origins, "data_replicate": _INNER, "data_shard": _INNER}
    return replace(resolved, mesh=made, origins=origins)
