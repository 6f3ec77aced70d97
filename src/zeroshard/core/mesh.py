"""The mesh: the ranks of a run as a grid, and the groups of ranks along its dimensions.

Pure arithmetic, without tensors or process groups. The dimensions, outermost first, are :data:`DIMS`.
Ranks are numbered in that order, so the ranks of one tensor group are neighbours, as in DeepSpeed's
topology (axes pipe, data, model).

A unit is sharded over the ranks that hold the same bytes, its *holders*. Tensor and pipeline parallelism
decide which bytes a rank holds. ZeRO does not need to know why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeVar

from zeroshard.errors import UsageError

T = TypeVar("T")

DIMS = ("pipeline", "data_replicate", "data_shard", "sequence", "tensor")
"""The dimensions of a mesh, outermost first. They are also the keys of the section ``parallel``."""

BATCH = frozenset({"data_replicate", "data_shard"})
"""Ranks that differ in these dimensions train on different samples."""

HOLDERS = BATCH | {"sequence"}
"""Ranks that differ only in these dimensions hold the same parameters, and their gradients are added."""

SHARDS = HOLDERS - {"data_replicate"}
"""Ranks that differ only in these dimensions share the shards of every unit: a shard group. Each replica
has one."""


@dataclass(frozen=True)
class Mesh:
    """The size of each dimension. The product is the number of ranks.

    ``node``: runs of so many neighbours of a shard group have a fast link among them, and collectives
    of units take one hop inside such a node and one hop between nodes; 1: one hop over all.

    ``expert`` divides the same ranks in another way: of a shard group, so many neighbours share the
    experts of a layer, and with ``data_before_expert`` 1 so many ranks far apart. Of an engine whose
    layers differ it is the largest number.

    >>> mesh = Mesh(pipeline=2, data_shard=2, tensor=2)
    >>> mesh.world_size, mesh.dp_size, mesh.text
    (8, 2, 'pipeline 2 x data_shard 2 x tensor 2')
    >>> mesh.coordinate(5)["tensor"], mesh.group(5, HOLDERS), mesh.groups({"tensor"})
    (1, (5, 7), [(0, 1), (2, 3), (4, 5), (6, 7)])
    """

    pipeline: int = 1
    data_replicate: int = 1
    data_shard: int = 1
    sequence: int = 1
    tensor: int = 1
    node: int = 1
    expert: int = 1
    data_before_expert: int = 0

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of :data:`DIMS`."""
        return tuple(getattr(self, dim) for dim in DIMS)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return prod(self.sizes)

    @property
    def dp_size(self) -> int:
        """The number of ranks that train on different samples. It divides batches."""
        return self.data_replicate * self.data_shard

    @property
    def is_data_only(self) -> bool:
        """Whether every rank holds the whole model and trains on samples of its own."""
        return self.dp_size == self.world_size

    @property
    def is_flat(self) -> bool:
        """Whether all ranks are one shard group, with one hop between any two of them."""
        return self.data_shard == self.world_size and self.node == 1

    @property
    def text(self) -> str:
        """The dimensions above 1, for messages."""
        big = [f"{dim} {size}" for dim, size in zip(DIMS, self.sizes, strict=True) if size > 1]
        return " x ".join(big) or "data_shard 1"

    @property
    def text_with_experts(self) -> str:
        """:attr:`text`, and how many ranks share the experts of a layer.

        >>> Mesh(data_shard=4, expert=2).text_with_experts
        'data_shard 4, expert 2'
        """
        return self.text if self.expert == 1 else f"{self.text}, expert {self.expert}"

    def coordinate(self, rank: int) -> Mapping[str, int]:
        """The position of ``rank`` in each dimension."""
        found = {}
        for dim, size in zip(reversed(DIMS), reversed(self.sizes), strict=True):
            rank, found[dim] = divmod(rank, size)
        return found

    def rank_at(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a position in each dimension: the inverse of :meth:`coordinate`."""
        return self._rank(tuple(coordinate[dim] for dim in DIMS))

    def dp_rank(self, rank: int) -> int:
        """The share of every batch that ``rank`` gets: a number below :attr:`dp_size`."""
        at = self.coordinate(rank)
        return at["data_replicate"] * self.data_shard + at["data_shard"]

    def group(self, rank: int, dims: Collection[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` only in ``dims``, in order; ``rank`` is one of them."""
        at = self.coordinate(rank)
        ranges = [
            range(size) if dim in dims else range(at[dim], at[dim] + 1)
            for dim, size in zip(DIMS, self.sizes, strict=True)
        ]
        return tuple(self._rank(place) for place in product(*ranges))

    def groups(self, dims: Collection[str]) -> list[tuple[int, ...]]:
        """All groups along ``dims``, in the order of their first ranks. Each rank is in one."""
        return self._all(self.group, dims)

    def node_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the node of ``rank`` inside its shard group, in order.

        >>> mesh = Mesh(data_shard=4, node=2)
        >>> mesh.node_group(3), mesh.across_nodes(3)
        ((2, 3), (1, 3))
        """
        ranks = self.group(rank, SHARDS)
        first = ranks.index(rank) // self.node * self.node
        return ranks[first : first + self.node]

    def across_nodes(self, rank: int) -> tuple[int, ...]:
        """The ranks at the place of ``rank`` in all nodes of its shard group, in order."""
        ranks = self.group(rank, SHARDS)
        return ranks[ranks.index(rank) % self.node :: self.node]

    def check_experts(self, size: int) -> None:
        """Check that ``size`` ranks of each shard group can share the experts of a layer.

        Raises:
            UsageError: they cannot.
        """
        shards = self.data_shard * self.sequence
        if shards % size:
            raise UsageError(
                f"ep_size {size}: the mesh is {self.text}, so a shard group has {shards} ranks "
                "(data_shard x sequence), which cannot be divided into groups of "
                f"{size} that share the experts of a layer. Use an ep_size that divides {shards}, or "
                "more ranks."
            )

    def expert_group(self, rank: int, size: int) -> tuple[int, ...]:
        """The ``size`` ranks that share the experts of a layer, ``rank`` among them, in order.

        >>> mesh = Mesh(data_shard=4)
        >>> mesh.expert_group(3, 2), mesh.expert_holders(3, 2), mesh.expert_place(3, 2)
        ((2, 3), (1, 3), 1)
        """
        shards = self.group(rank, SHARDS)
        at, steps = shards.index(rank), len(shards) // size
        if self.data_before_expert:
            return shards[at % steps :: steps]
        return shards[at - at % size :][:size]

    def same_experts(self, rank: int, size: int) -> tuple[int, ...]:
        """The ranks that hold the same experts as ``rank``, those of all replicas, in order.

        >>> mesh = Mesh(data_replicate=2, data_shard=4)
        >>> mesh.same_experts(1, 2), mesh.expert_holders(1, 2), mesh.expert_replicas(2)
        ((1, 3, 5, 7), (1, 3), 2)
        >>> mesh.same_experts(1, 4), mesh.expert_holders(1, 4), mesh.expert_replicas(4)
        ((1, 5), (1, 5), 1)
        """
        replicas = self.group(rank, {"data_replicate"})
        return tuple(sorted(r for each in replicas for r in self._same_in_replica(each, size)))

    def expert_replicas(self, size: int) -> int:
        """How many copies of the sharded state of experts there are.

        As many as of all else. But if each rank of a shard group has other experts, a replica could not
        shard them, so the replicas share them: one copy.
        """
        return self.data_replicate if self.data_shard * self.sequence > size else 1

    def expert_holders(self, rank: int, size: int) -> tuple[int, ...]:
        """The ranks that share the shards of the experts of ``rank``, in order.

        They are ranks of one replica, unless :meth:`expert_replicas` is 1.
        """
        if self.expert_replicas(size) < self.data_replicate:
            return self.same_experts(rank, size)
        return self._same_in_replica(rank, size)

    def _same_in_replica(self, rank: int, size: int) -> tuple[int, ...]:
        shards = self.group(rank, SHARDS)
        at, steps = shards.index(rank), len(shards) // size
        if self.data_before_expert:
            return shards[at - at % steps :][:steps]
        return shards[at % size :: size]

    def expert_place(self, rank: int, size: int) -> int:
        """Which part of the experts ``rank`` has: its position in :meth:`expert_group`."""
        return self.expert_group(rank, size).index(rank)

    def expert_groups(self, size: int) -> list[tuple[int, ...]]:
        """All groups of :meth:`expert_group`."""
        return self._all(self.expert_group, size)

    def same_expert_groups(self, size: int) -> list[tuple[int, ...]]:
        """All groups of :meth:`same_experts`."""
        return self._all(self.same_experts, size)

    def expert_holder_groups(self, size: int) -> list[tuple[int, ...]]:
        """All groups of :meth:`expert_holders`."""
        return self._all(self.expert_holders, size)

    def tensor_runs(self, size: int) -> list[tuple[int, ...]]:
        """The tensor groups, divided into runs of ``size`` neighbours. ``size`` divides the tensor size.

        >>> Mesh(data_shard=2, tensor=4).tensor_runs(2)
        [(0, 1), (2, 3), (4, 5), (6, 7)]
        """
        groups = self.groups({"tensor"})
        return [group[at : at + size] for group in groups for at in range(0, self.tensor, size)]

    def tied_group(self, rank: int, pipeline: Collection[int]) -> tuple[int, ...]:
        """The ranks that hold a tied weight of the pipeline ranks ``pipeline``, in order.

        They hold the same part of it as ``rank`` does, or would if it were on one of them.

        >>> Mesh(pipeline=4, data_shard=2).tied_group(1, (0, 3))
        (0, 1, 6, 7)
        """
        around = self.group(rank, HOLDERS | {"pipeline"})
        return tuple(r for r in around if self.coordinate(r)["pipeline"] in pipeline)

    def tied_groups(self, pipeline: Collection[int]) -> list[tuple[int, ...]]:
        """All groups of :meth:`tied_group`. Ranks of other pipeline ranks are in none of them."""
        return self._all(self.tied_group, pipeline)

    def _all(self, group: Callable[[int, T], tuple[int, ...]], by: T) -> list[tuple[int, ...]]:
        return list(dict.fromkeys(group(rank, by) for rank in range(self.world_size)))

    def _rank(self, place: tuple[int, ...]) -> int:
        rank = 0
        for size, at in zip(self.sizes, place, strict=True):
            rank = rank * size + at
        return rank
