"""One rank equals plain PyTorch bit for bit, at every stage and precision, for every model."""

from __future__ import annotations

import pytest
from compare import CASES, COMBINATIONS, STAGES, oracle, trained
from support.parity import assert_bit_equal


@pytest.mark.parametrize(("precision", "accumulation"), COMBINATIONS)
@pytest.mark.parametrize("name", CASES)
def test_one_rank_is_plain_pytorch_bit_for_bit(name, precision, accumulation):
    # One micro-batch, or sums that are not rounded: plain PyTorch runs once for all stages.
    alike = accumulation == 1 or precision in ("fp64", "fp32")
    for stages, rounds_sum in [(STAGES, True)] if alike else [((0, 1), True), ((2, 3), False)]:
        expected = oracle(name, precision, accumulation, world=1, rounds_sum=rounds_sum)
        for stage in stages:
            run = trained(name, precision, accumulation, stage=stage, world=1)
            assert_bit_equal(run, expected)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
def test_without_clipping_too(stage):
    expected = oracle("mlp", "fp32", 1, world=1, rounds_sum=True, clip=0.0)
    assert_bit_equal(trained("mlp", "fp32", 1, stage=stage, world=1, clip=0.0), expected)
