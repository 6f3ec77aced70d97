"""Stores the shard of a unit that is gathered in 8 bits per element (qwZ of ZeRO++).

The shard is exact. What travels is its wire (:mod:`zeroshard.comm.quantized`), and every rank computes
with what the wires stand for, this rank's own part included. So all ranks have equal parameters. They
differ from the shards by up to 1/254 of the largest magnitude among 64 neighbours. Updates, checkpoints
and exports use the exact shards.

With nodes a rank keeps the wires of its place in all nodes, and parameters are gathered inside the node
from the second time on, as in :mod:`zeroshard.offload.node_store`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.comm.collectives import Then
from zeroshard.comm.hops import NestedComm
from zeroshard.comm.quantized import from_wire, to_wire, wire_nbytes
from zeroshard.offload.shard_store import MemoryShardStore

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

BITS = 8
"""Of each element of a parameter, as in DeepSpeed."""


class QuantizedShardStore(MemoryShardStore):
    """A shard in device memory whose unit is gathered in 8 bits, and the wire that was sent last.

    ``comm`` gathers the unit. ``in_node``: the store keeps the wires of its place in all nodes; ``comm``
    is a :class:`~zeroshard.comm.hops.NestedComm` then.
    """

    def __init__(self, shard_S: Tensor, comm: Comm, *, in_node: bool) -> None:
        super().__init__(shard_S)
        count, at = 1, 0
        if in_node:
            assert isinstance(comm, NestedComm)
            count, at = comm.outer.size, comm.outer.rank
        self._in_node = in_node
        shape = count, wire_nbytes(shard_S.numel(), BITS)
        self._wires = shard_S.new_zeros(shape, dtype=torch.uint8)
        self._own = self._wires[at]
        self._begin = at * shard_S.numel()
        self._is_whole = False  # all wires are those of the shards
        self._given = (
            self._own
        )  # what the full unit was filled from, as far as it is this rank's part
        self._edited: Tensor | None = None  # elements that were edited since then

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        return self.shard_S, self._wires

    def write(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Other ranks wrote their shards too."""
        self._is_whole = False

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Inside the node if that is enough."""
        wires = self._wires.new_empty((comm.size, self._own.numel()))
        flat = wires.view(-1)
        if not self._is_whole or not self._in_node:
            self._own.copy_(to_wire(self.shard_S, BITS))
        if not isinstance(comm, NestedComm) or not self._in_node:
            handle = comm.all_gather(flat, self._own, name=name)
        elif self._is_whole:
            handle = comm.gather_from_node(flat, self._wires.view(-1), name=name)
        else:
            handle = comm.gather_through(flat, self._wires.view(-1), self._own, name=name)
        return Then(lambda: fill(full_N, wires), handle)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._is_whole = True
        self._given, self._edited = self._own, None

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Takes over only what was edited.

        The other elements of the part are rounded, and the shard has their exact values. An edit that
        PyTorch has not counted is seen by other ranks from the next update on.
        """
        differs = from_wire(self._given, torch.empty_like(part_S), BITS) != part_S
        if self._edited is not None:
            differs |= self._edited
        self.shard_S.copy_(torch.where(differs, part_S, self.shard_S))
        if edited:
            self._edited = differs
            if self._in_node:
                self._round_again(part_S)

    def _round_again(self, part_S: Tensor) -> None:
        """Make those wires again that do not stand for the node part. It is equal in all nodes."""
        if self._given is self._own:
            self._given = self._own.clone()
        shape = len(self._wires), part_S.numel()
        rows = part_S.as_strided(shape, (shape[1], 1), part_S.storage_offset() - self._begin)
        differs = from_wire(self._wires, torch.empty_like(rows), BITS) != rows
        anew = differs.any(-1, keepdim=True)
        self._wires.copy_(torch.where(anew, to_wire(rows, BITS), self._wires))


def fill(full_N: Tensor, wires: Tensor) -> None:
    """Fill a unit from the wires of all shards, uint8 ``[W, B]``."""
    from_wire(wires, full_N.view(len(wires), -1), BITS)
