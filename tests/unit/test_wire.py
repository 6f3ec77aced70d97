"""Rounding in blocks of 64 elements: error, sizes, and numbers that are not finite."""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm.quantized import BLOCK, from_wire, to_wire, wire_nbytes

BITS = (8, 4)


def around(values, bits):
    return from_wire(to_wire(values, bits), torch.empty_like(values), bits)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_an_element_is_off_by_at_most_half_a_scale(bits, dtype):
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(6, 4 * BLOCK, generator=generator) * 10.0 ** torch.arange(-3, 3)[:, None]
    values = values.to(dtype)
    wire = to_wire(values, bits)
    assert wire.dtype == torch.uint8
    assert wire.shape == (6, wire_nbytes(4 * BLOCK, bits))
    found = from_wire(wire, torch.empty_like(values), bits)
    largest = values.abs().view(6, 4, BLOCK).amax(-1, keepdim=True).float()
    off = (found.float() - values.float()).abs().view(6, 4, BLOCK)
    rounding = torch.finfo(dtype).eps * largest
    assert (off <= largest / (254 if bits == 8 else 14) * 1.0001 + rounding).all()
    assert (off > 0).any()


@pytest.mark.parametrize("bits", BITS)
def test_whole_multiples_of_the_scale_are_exact(bits):
    largest = 2 ** (bits - 1) - 1
    codes = torch.arange(2 * BLOCK) % (2 * largest + 1) - largest
    codes[::BLOCK] = largest  # so that 1/2 is the scale of each block
    values = codes.float() * 0.5
    assert torch.equal(around(values, bits), values)
    assert torch.equal(around(torch.zeros(BLOCK), bits), torch.zeros(BLOCK))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_number_that_is_not_finite_is_seen_in_its_block_only(bits, bad):
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    seen = around(values, bits).isfinite().view(3, BLOCK)
    assert seen[0].all()
    assert not seen[1].any()
    assert seen[2].all()
