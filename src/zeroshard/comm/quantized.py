"""Sums of gradients that travel in 4 bits per element (qgZ of ZeRO++, arXiv 2306.10209, section 3.3).

Every rank rounds its gradient, sends each slice to the rank that adds it up, and adds what it received in
fp32, in the order of ranks. With nodes there are two such hops: the sum of a node is rounded again before
it leaves the node. So an element is rounded once per hop, however many ranks there are. In a ring it
would be rounded at every rank. This is another computation than a sum of gradients.

*Rounding* is to 8 or 4 bits per element, with one scale for each block of 64 neighbours. Parameters start
at multiples of 64 elements of a unit (ADR 0001), so no block has elements of two parameters. The scale is
the largest magnitude of the block, divided by 127 (8 bits) or 7 (4 bits), in fp32. Codes are symmetric
around 0. An element is off by at most half a scale: 1/254 or 1/14 of the largest magnitude of its block.
A block with a number that is not finite has only such numbers afterwards, so an overflow is seen.

The *wire* of K elements is uint8 ``[K bits / 8 + K / 16]``: the codes, then the scales. It has 1.06 bytes
per element with 8 bits, and 0.56 with 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.collectives import DONE, Comm, Handle, Then
from zeroshard.comm.hops import NestedComm

BITS = 4
"""Of each element of a gradient, as in DeepSpeed."""


class QuantizedSums:
    """A communicator that reduces in 4 bits, and does everything else as ``comm`` does.

    ``comm`` has one hop, or is a :class:`~zeroshard.comm.hops.NestedComm`. ``gaps``: ``(begin, end)``
    of the padding of the gradients, whose contents are undefined and must not be rounded with others.
    """

    def __init__(self, comm: Comm, gaps: Sequence[tuple[int, int]] = ()) -> None:
        self._comm = comm
        self._gaps = gaps
        self.size = comm.size
        self.rank = comm.rank
        self.transport = comm.transport
        self.recorder = comm.recorder
        self.all_gather = comm.all_gather  # exact, as is all else but the reductions
        self.all_gather_small = comm.all_gather_small
        self.broadcast = comm.broadcast
        self.close = comm.close

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Plain memory, since not it is sent."""
        return torch.empty(numel, dtype=dtype, device=device)

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """The sum over all ranks of what they sent. ``out_S`` may lie inside ``full_N``."""
        comm = self._comm
        if not full_N.numel():
            return DONE
        for begin, end in self._gaps:
            full_N[begin:end].zero_()
        if not isinstance(comm, NestedComm):
            return _summed(comm, out_S, full_N, name)
        part_M = out_S.new_empty(full_N.numel() // comm.inner.size, dtype=_wide(out_S))
        comm.free_hop(comm.inner)
        first = _summed(comm.inner, part_M, full_N, name)
        second = partial(_summed, comm.outer, out_S, part_M, name)
        return comm.in_parts(first, second, comm.outer, (full_N, out_S, part_M))


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _summed(comm: Any, out: Tensor, full: Tensor, name: str) -> Handle:
    """Start the reduce-scatter of ``full`` over one hop."""
    rows = full.view(comm.size, -1)
    sent = to_wire(rows, BITS)
    received = torch.empty_like(sent)
    handle = comm.all_to_all(received.view(-1), sent.view(-1), name=name)

    def add() -> None:
        total = out.new_zeros(out.shape, dtype=_wide(out))
        term = torch.empty_like(total)
        for row in received.unbind():
            total += from_wire(row, term, BITS)
        out.copy_(total)

    return Then(add, handle)


BLOCK = 64
"""Elements that have one scale."""

_SCALE_NBYTES = 4


def wire_nbytes(numel: int, bits: int) -> int:
    """Bytes of the wire of ``numel`` elements, a multiple of 64.

    >>> wire_nbytes(128, 8), wire_nbytes(128, 4)
    (136, 72)
    """
    return numel * bits // 8 + numel // BLOCK * _SCALE_NBYTES


def to_wire(values: Tensor, bits: int) -> Tensor:
    """The wires ``[..., B]``, uint8, of the rows of ``values`` ``[..., K]``."""
    rows, numel = values.shape[:-1], values.shape[-1]
    blocks = values.reshape(*rows, numel // BLOCK, BLOCK).float()
    largest = 2 ** (bits - 1) - 1
    scales = blocks.abs().amax(-1, keepdim=True) / largest
    codes = (blocks / torch.where(scales == 0, 1, scales)).round_().to(torch.int8)
    flat = codes.view(*rows, numel)
    if bits == 4:  # two codes in a byte, of elements that are half a row apart
        low, high = flat.chunk(2, -1)
        flat = (low & 15) | (high << 4)
    packed = scales.squeeze(-1).contiguous().view(torch.uint8)
    return torch.cat([flat.view(torch.uint8), packed], -1)


def from_wire(wire: Tensor, out: Tensor, bits: int) -> Tensor:
    """Write what wires ``[..., B]`` stand for into ``out`` ``[..., K]``. Returns ``out``."""
    numel = out.shape[-1]
    code_nbytes = numel * bits // 8
    flat = wire[..., :code_nbytes].view(torch.int8)
    scales = wire[..., code_nbytes:].contiguous().view(torch.float32)
    if bits == 4:
        flat = torch.cat([(flat << 4) >> 4, flat >> 4], -1)
    blocks = flat.reshape(*out.shape[:-1], numel // BLOCK, BLOCK).float()
    return out.copy_(blocks.mul_(scales.unsqueeze(-1)).view(out.shape))
