"""Stores the shards that the ranks at one place of all nodes own: the second shards of hpZ (ZeRO++).

A unit is sharded over W = I O ranks, O nodes of I (:mod:`zeroshard.comm.hops`). Between steps a rank
has memory for its node part ``[M]``, M = N / I, and its own shard is a slice of it. After an update only
the shard is valid. The next all-gather fetches the other shards of the part from the other nodes. From
then on, until the next update, the unit is gathered inside the node. So parameters pass between nodes
once per step, whatever the number of micro-batches; those that are not trained, once.

This is a unit whose parameters are sharded inside a node, and whose optimizer state is sharded over all.
DeepSpeed keeps second shards beside the first ones; here the first are a part of the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.comm.hops import NestedComm
from zeroshard.offload.shard_store import MemoryShardStore

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle


class NodeMemory:
    """Makes the memory and the store of one unit that is gathered by ``comm``."""

    def __init__(self, comm: NestedComm, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._part_M: Tensor | None = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory ``[numel]`` for the shard, inside that of the node part."""
        outer = self._comm.outer
        self._part_M = torch.zeros(numel * outer.size, dtype=dtype, device=self._device)
        return self._part_M[outer.rank * numel : (outer.rank + 1) * numel]

    def shard_store(self, shard_S: Tensor) -> NodeShardStore:
        """The store of a shard that :meth:`allocate` gave."""
        assert self._part_M is not None, "allocate() comes first"
        return NodeShardStore(shard_S, self._part_M)


class NodeShardStore(MemoryShardStore):
    """A shard in device memory, with the shards of the ranks at its place in other nodes."""

    def __init__(self, shard_S: Tensor, part_M: Tensor) -> None:
        super().__init__(shard_S)
        self._part_M = part_M
        self._begin = shard_S.storage_offset()
        self._is_whole = False  # the part has the values of all its shards

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        return (self._part_M,)

    def write(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Other ranks wrote their shards too."""
        self._is_whole = False

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Inside the node if that is enough."""
        assert isinstance(comm, NestedComm)
        if self._is_whole:
            return comm.gather_from_node(full_N, self._part_M, name=name)
        return comm.gather_through(full_N, self._part_M, self.shard_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._is_whole = True

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Copies M elements in any case."""
        begin = part_S.storage_offset() - self._begin
        self._part_M.copy_(part_S.as_strided(self._part_M.shape, (1,), begin))
