"""One rank equals plain PyTorch bit for bit, every model, every precision, every stage."""

from __future__ import annotations

import itertools

import pytest
from compare import CASES, COMBINATIONS, HALVES, STAGES, oracle, stages_of, trained
from support.covering import each_value
from support.parity import assert_bit_equal


@pytest.mark.parametrize(
    ("name", "training", "half"),
    each_value([*itertools.product(CASES, COMBINATIONS, HALVES)]),
    ids=str,
)
def test_one_rank_is_plain_pytorch_bit_for_bit(name, training, half):
    precision, accumulation = training
    # With several micro-batches the first half of the stages rounds their sum.
    rounds_sum = accumulation == 1 or half == "first"
    expected = oracle(name, precision, accumulation, world=1, rounds_sum=rounds_sum)
    for stage in stages_of(half, accumulation):
        assert_bit_equal(trained(name, precision, accumulation, stage=stage, world=1), expected)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
def test_without_clipping_too(stage):
    expected = oracle("mlp", "fp32", 1, world=1, rounds_sum=True, clip=0.0)
    assert_bit_equal(trained("mlp", "fp32", 1, stage=stage, world=1, clip=0.0), expected)
