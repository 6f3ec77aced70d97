"""Rounds flat tensors to 8 or 4 bits per element, with one scale for each block of 64 elements.

A block is 64 neighbours. Parameters start at multiples of 64 elements of a unit (ADR 0001), so no block
has elements of two parameters. The scale is the largest magnitude of the block, divided by 127 (8 bits)
or 7 (4 bits), in fp32. Codes are symmetric around 0. An element is off by at most half a scale: 1/254 or
1/14 of the largest magnitude of its block. A block with a number that is not finite has only such numbers
afterwards, so an overflow is seen.

The *wire* of K elements is uint8 ``[K bits / 8 + K / 16]``: the codes, then the scales. It has 1.06 bytes
per element with 8 bits, and 0.56 with 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
