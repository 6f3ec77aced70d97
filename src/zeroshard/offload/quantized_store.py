"""Stores the shard of a unit that is gathered in 8 bits per element (qwZ of ZeRO++).

The shard is exact. What travels is its wire (:mod:`zeroshard.precision.blocks`), and every rank computes
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

from zeroshard.comm.nested import NestedComm
from zeroshard.comm.quantized import Then
from zeroshard.offload.shard_store import MemoryShardStore
from zeroshard.precision.blocks import from_wire, to_wire, wire_nbytes

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

BITS = 8
"""Of each element of a parameter, as in DeepSpeed."""


class QuantizedShardStore(MemoryShardStore):
    """A shard in device memory whose unit is gathered in 8 bits."""

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        wire = to_wire(self.shard_S, BITS)
        wires = wire.new_empty(comm.size * wire.numel())
        return _filling(comm.all_gather(wires, wire, name=name), wires, full_N, comm)

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Takes over only what was edited.

        The other elements of the part are rounded, and the shard has their exact values.
        """
        self._take_over(to_wire(self.shard_S, BITS), part_S)

    def _take_over(self, wire: Tensor, part_S: Tensor) -> None:
        given_S = from_wire(wire, torch.empty_like(part_S), BITS)
        self.shard_S.copy_(torch.where(given_S == part_S, self.shard_S, part_S))


class QuantizedNodeStore(QuantizedShardStore):
    """The same, with the wires of this rank's place in all nodes. ``outer``: the number of nodes."""

    def __init__(self, shard_S: Tensor, comm: NestedComm) -> None:
        super().__init__(shard_S)
        self._wire_nbytes = wire_nbytes(shard_S.numel(), BITS)
        self._wires = shard_S.new_zeros(comm.outer.size * self._wire_nbytes, dtype=torch.uint8)
        self._own = self._wires.view(comm.outer.size, -1)[comm.outer.rank]
        self._part_numel = comm.outer.size * shard_S.numel()
        self._begin = comm.outer.rank * shard_S.numel()
        self._is_whole = False  # all wires are those of the shards

    @property
    def memories(self) -> tuple[Tensor, ...]:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        return self.shard_S, self._wires

    def write(self) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Other ranks wrote their shards too."""
        self._is_whole = False

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`. Inside the node if that is enough."""
        assert isinstance(comm, NestedComm)
        wires = self._wires.new_empty(comm.size * self._wire_nbytes)
        if self._is_whole:
            handle = comm.gather_from_node(wires, self._wires, name=name)
        else:
            self._own.copy_(to_wire(self.shard_S, BITS))
            handle = comm.gather_through(wires, self._wires, self._own, name=name)
        return _filling(handle, wires, full_N, comm)

    def close_gather(self, part_S: Tensor) -> None:
        """See :class:`~zeroshard.offload.shard_store.ShardStore`."""
        self._is_whole = True

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """See :class:`QuantizedShardStore`. Where something was edited, the wires are made again.

        Ranks at one place have equal parts, so they make equal wires.
        """
        self._take_over(self._own, part_S)
        begin = part_S.storage_offset() - self._begin
        part_M = part_S.as_strided((self._part_numel,), (1,), begin)
        rows = self._wires.view(-1, self._wire_nbytes)
        part_rows = part_M.view(len(rows), -1)
        differs = (from_wire(rows, torch.empty_like(part_rows), BITS) != part_rows).any()
        rows.copy_(torch.where(differs, to_wire(part_rows, BITS), rows))


def _filling(handle: Handle, wires: Tensor, full_N: Tensor, comm: Comm) -> Handle:
    """The wait for ``handle``, which then fills ``full_N`` from the wires."""

    def fill() -> None:
        from_wire(wires.view(comm.size, -1), full_N.view(comm.size, -1), BITS)

    return Then(handle, fill)
