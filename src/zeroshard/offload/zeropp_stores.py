"""Stores shards whose units are gathered inside nodes (hpZ of ZeRO++), or in 8 bits per element (qwZ).

*Inside nodes.* A unit is sharded over W = I O ranks, O nodes of I (:mod:`zeroshard.comm.hops`). Between
steps a rank has memory for its node part ``[M]``, M = N / I: the shards that the ranks at its place in
all nodes own. Its own shard is a slice of it. After an update only the shard is valid. The next
all-gather fetches the other shards of the part from the other nodes. From then on, until the next update,
the unit is gathered inside the node. So parameters pass between nodes once per step, whatever the number
of micro-batches; those that are not trained, once. DeepSpeed keeps second shards beside the first ones;
here the first are a part of the second.

*In 8 bits.* The shard is exact. What travels is its wire (:mod:`zeroshard.comm.quantized`), and every
rank computes with what the wires stand for, this rank's own part included. So all ranks have equal
parameters. They differ from the shards by up to 1/254 of the largest magnitude among 64 neighbours.
Updates, checkpoints and exports use the exact shards. With nodes a rank keeps the wires of its place in
all nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.comm.collectives import Then
from zeroshard.comm.hops import NestedComm
from zeroshard.comm.quantized import from_wire, to_wire, wire_nbytes
from zeroshard.offload.shard_store import ShardStore

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle

BITS = 8
"""Of each element of a quantized parameter, as in DeepSpeed."""


def allocate_in_node(nodes: Comm, device: torch.device, numel: int, dtype: torch.dtype) -> Tensor:
    """Zeroed memory ``[numel]`` for a shard, inside that of its node part. ``nodes``: connects them."""
    part_M = torch.zeros(numel * nodes.size, dtype=dtype, device=device)
    return part_M[nodes.rank * numel : (nodes.rank + 1) * numel]


class NodeShardStore(ShardStore):
    """A shard from :func:`allocate_in_node`, with those of the ranks at its place in other nodes."""

    def __init__(self, shard_S: Tensor, *, nodes: int) -> None:
        super().__init__(shard_S)
        self._part_M = shard_S.as_strided((shard_S.numel() * nodes,), (1,), 0)
        self._begin = shard_S.storage_offset()
        self._is_whole = False  # the part has the values of all its shards

    @property
    def memories(self) -> tuple[Tensor, ...]:
        return (self._part_M,)

    def write(self) -> None:
        """Other ranks wrote their shards too."""
        self._is_whole = False

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """Inside the node if that is enough."""
        assert isinstance(comm, NestedComm)
        if self._is_whole:
            return comm.gather_from_node(full_N, self._part_M, name=name)
        return comm.gather_through(full_N, self._part_M, self.shard_S, name=name)

    def close_gather(self, part_S: Tensor) -> None:
        self._is_whole = True

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Copies M elements in any case."""
        begin = part_S.storage_offset() - self._begin
        self._part_M.copy_(part_S.as_strided(self._part_M.shape, (1,), begin))


class QuantizedShardStore(ShardStore):
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
        # What the full unit was filled from, as far as it is this rank's part.
        self._given = self._own
        self._edited: Tensor | None = None  # elements that were edited since then

    @property
    def memories(self) -> tuple[Tensor, ...]:
        return self.shard_S, self._wires

    def write(self) -> None:
        """As in :class:`NodeShardStore`."""
        self._is_whole = False

    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        """Inside the node if that is enough."""
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
        return Then(lambda: _fill(full_N, wires), handle)

    def close_gather(self, part_S: Tensor) -> None:
        self._is_whole = True
        self._given, self._edited = self._own, None

    def write_back(self, part_S: Tensor, *, edited: bool) -> None:
        """Takes over only what was edited.

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


def _fill(full_N: Tensor, wires: Tensor) -> None:
    """Fill a unit from the wires of all shards, uint8 ``[W, B]``."""
    from_wire(wires, full_N.view(len(wires), -1), BITS)
