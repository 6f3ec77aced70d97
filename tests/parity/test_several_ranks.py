"""Two and three ranks equal plain PyTorch on the global batch. All stages equal each other."""

from __future__ import annotations

import itertools

import kit
import pytest
import torch
from compare import CASES, COMBINATIONS, HALVES, STAGES, check_stages, oracle, stages_of, trained
from support.covering import each_value, sampled
from support.parity import assert_bit_equal
from zeroshard_testing import on_ranks

from zeroshard.zero import safe_get_full_fp32_param

TRAININGS = [c for c in COMBINATIONS if c != ("bf16", 3)]
"""Precision and micro-batches. Sums of 16 bit: fp16 shows them."""


@pytest.mark.parametrize(
    ("name", "training", "half"),
    each_value([*itertools.product(CASES, TRAININGS, HALVES)]),
    ids=str,
)
@on_ranks(2)
def test_two_ranks_equal_one_process(name, training, half):
    precision, accumulation = training
    check_stages(stages_of(half, accumulation), name, precision, accumulation, world=2)


@pytest.mark.parametrize("name", sampled([*CASES], every=3))
@on_ranks(3)
def test_three_ranks_equal_one_process(name):
    """Stages 1 and 3 pad all that is sharded. Stage 0 pads nothing, stage 2 as stage 1."""
    check_stages((1, 3), name, "fp64", 1, world=3)


@pytest.mark.smoke
@on_ranks(2)
def test_every_stage_on_two_ranks_gives_the_parameters_of_plain_pytorch_bit_for_bit():
    """In fp32 without clipping: a mean over two ranks does not round, but a norm is summed in
    another order."""
    for name in ("mlp", "transformer"):
        expected = oracle(name, "fp32", 1, world=2, rounds_sum=True, clip=0.0).params
        for stage in STAGES:
            found = trained(name, "fp32", 1, stage=stage, world=2, clip=0.0).params
            assert found.keys() == expected.keys()
            different = [key for key in expected if not torch.equal(found[key], expected[key])]
            assert not different, f"{name}, stage {stage}: {different}"


BUCKETS = {"one element": 1, "one parameter": 23 * 35, "huge": 500_000_000}
KNOBS = [
    {"reduce_bucket_size": bucket, "overlap_comm": overlap}
    for bucket in BUCKETS.values()
    for overlap in (True, False)
] + [
    {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0},
    {"stage3_max_live_parameters": 0, "allgather_bucket_size": 64},
    {"contiguous_gradients": False, "reduce_scatter": False, "round_robin_gradients": True},
    {"sub_group_size": 64, "stage3_param_persistence_threshold": 0},
]


CHANGED: dict[tuple[str, int], list[dict]] = {}
"""The knobs that are changed for each model and stage."""
for name, stage, knob in each_value(
    [
        *itertools.product(
            ("reused_checkpointed", "tied", "experts", "lora"), STAGES, range(len(KNOBS))
        )
    ]
):
    CHANGED.setdefault((name, stage), []).append(KNOBS[knob])


@pytest.mark.parametrize(("name", "stage"), CHANGED)
@on_ranks(2)
def test_no_knob_changes_a_bit(name, stage):
    plain = trained(name, "bf16", 2, stage=stage, world=2)
    for knobs in CHANGED[name, stage]:
        config = {"zero_optimization": knobs}
        assert_bit_equal(trained(name, "bf16", 2, stage=stage, world=2, config=config), plain)


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_the_transport_changes_no_bit(stage):
    runs = [
        trained("transformer", "bf16", 1, stage=stage, world=2, config={"transport": transport})
        for transport in ("shm", "p2p", "stock")
    ]
    for run in runs[1:]:
        assert_bit_equal(run, runs[0])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_units_change_no_bit_of_the_update(stage):
    plain = trained("transformer", "bf16", 1, stage=stage, world=2, clip=0.0)
    for config in (
        {"unit_min_numel": 10**6},
        {"units": ["Layer"]},
        {"units": ["Linear", "RMSNorm"]},
    ):
        run = trained("transformer", "bf16", 1, stage=stage, world=2, clip=0.0, config=config)
        # Other units cut parameters elsewhere, so the norm is the same sum in another order.
        assert run.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)
        run.grad_norms = plain.grad_norms
        assert_bit_equal(run, plain)


DIVISIONS = {
    "by the ranks": {"prescale_gradients": True},
    "by a factor": {"gradient_predivide_factor": 4.0},
    "by the ranks, not the factor": {
        "prescale_gradients": True, "gradient_predivide_factor": 4.0
    },
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_dividing_before_reducing_gives_the_mean_of_plain_pytorch(stage):
    """Powers of two: dividing earlier rounds nothing."""
    expected = oracle("mlp", "fp32", 1, world=2, rounds_sum=True, clip=0.0).params
    for name, keys in DIVISIONS.items():
        found = trained("mlp", "fp32", 1, stage=stage, world=2, clip=0.0, config=keys).params
        different = [key for key in expected if not torch.equal(found[key], expected[key])]
        assert not different, f"{name}: {different}"


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_are_divided_before_they_are_added(stage):
    """The smallest numbers vanish if they are divided by 4, and not if by the two ranks."""
    changed = {}
    for name, keys in [("after the sum", {}), *DIVISIONS.items()]:
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 2.0**120}}}
        with kit.engine(model, stage, **sgd, **keys) as engine:
            engine.backward(engine(torch.full((1, 1), 2.0**-148)).sum())  # the second smallest one
            engine.step()
            changed[name] = bool(safe_get_full_fp32_param(model.weight).any())
    assert changed == {
        "after the sum": True,
        "by the ranks": True,
        "by a factor": False,
        "by the ranks, not the factor": True,
    }
