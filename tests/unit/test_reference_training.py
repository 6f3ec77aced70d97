"""The reference implementation is right, and the edge-case models are suitable for comparison."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from support import CASES
from support.edge_case_models import Case, Mlp, features, mse
from support.parity import (
    Scale,
    adamw,
    assert_bit_equal,
    assert_close_trajectory,
    cast_parameters,
    make_batches,
    reference_run,
    sgd,
)

from zeroshard.precision.loss_scaler import DynamicScale

MLP = CASES["mlp"]


def _run(case, optimizer=None, *, steps=2, world=2, accumulation=1, **options):
    batches = make_batches(case, steps=steps, world=world, accumulation=accumulation)
    return reference_run(case, optimizer or adamw(), batches, **options)


@pytest.mark.parametrize("name", CASES)
def test_rounding_stays_small_in_every_case(name):
    exact = _run(CASES[name], steps=3, world=3, accumulation=2, clip=0.3, precision="fp64")
    rough = _run(CASES[name], steps=3, world=3, accumulation=2, clip=0.3, precision="fp32")
    rough.params = {key: value.to(exact.params[key].dtype) for key, value in rough.params.items()}
    assert_close_trajectory(rough, exact, rtol=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_in_16_bit(name, precision):
    exact = _run(CASES[name], precision="fp64")
    rough = _run(CASES[name], precision=precision, scale=Scale(value=2.0**10))
    for a, b in zip(rough.losses, exact.losses, strict=True):
        assert abs(a - b) < 0.02 * abs(b)


@pytest.mark.parametrize("name", CASES)
def test_models_and_batches_are_the_same_at_every_call(name):
    assert_bit_equal(_run(CASES[name], steps=1), _run(CASES[name], steps=1))


@pytest.mark.parametrize(("world", "accumulation"), [(3, 1), (1, 3), (2, 2)])
def test_ranks_and_micro_batches_are_one_large_batch(world, accumulation):
    batches = make_batches(MLP, steps=3, world=world, accumulation=accumulation)
    large = [
        [[tuple(map(torch.cat, zip(*(b for ranks in micros for b in ranks), strict=True)))]]
        for micros in batches
    ]
    split = reference_run(MLP, adamw(), batches, precision="fp64", clip=0.5)
    whole = reference_run(MLP, adamw(), large, precision="fp64", clip=0.5)
    assert_close_trajectory(split, whole, rtol=1e-12)


def test_16_bit_masters_move_by_less_than_16_bit_can_show():
    run = _run(MLP, sgd(lr=1e-6), steps=1, precision="bf16")
    start = cast_parameters(MLP.build(), torch.bfloat16)
    name, before = next(iter(start.named_parameters()))
    assert torch.equal(run.params[name], before)
    assert not torch.equal(run.masters[name], before.float())


def test_router_and_frequencies_stay_fp32():
    model = cast_parameters(
        CASES["experts"].build(), torch.bfloat16, keep_fp32=CASES["experts"].config["keep_fp32"]
    )
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert kept == {"layers.0.router.weight", "layers.1.router.weight"}
    transformer = cast_parameters(CASES["transformer"].build(), torch.bfloat16)
    assert {b.dtype for b in transformer.buffers()} == {torch.float32}


def test_tied_parameters_stay_tied():
    model = cast_parameters(CASES["tied"].build(), torch.bfloat16)
    assert model.head.weight is model.embed.weight


def _with_overflow_in(step, batches):
    batches = copy.deepcopy(batches)
    batches[step][0][-1][0].fill_(float("inf"))
    return batches


def _halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5**i)


def test_overflow_skips_the_step_halves_the_scale_and_keeps_the_schedule():
    batches = _with_overflow_in(1, make_batches(MLP, steps=3, world=2))
    scale = Scale(value=2.0**8, hysteresis=1)
    run = reference_run(MLP, sgd(), batches, precision="fp16", scale=scale, schedule=_halving)
    without = [batches[0], batches[2]]
    clean = reference_run(
        MLP, sgd(), without, precision="fp16", scale=Scale(value=2.0**8), schedule=_halving
    )
    assert run.skipped == [False, True, False]
    assert run.scales == [256, 256, 128]
    assert run.lrs == [0.1, 0.05, 0.05]
    assert run.losses[2] == clean.losses[1], "the skipped step changed nothing"


def test_the_loss_scale_itself_changes_nothing():
    small = _run(MLP, precision="fp16", scale=Scale(value=1.0, dynamic=False))
    large = _run(MLP, precision="fp16", scale=Scale(value=2.0**9, dynamic=False))
    for a, b in zip(small.losses, large.losses, strict=True):
        assert abs(a - b) < 1e-3 * abs(b)


@pytest.mark.parametrize("consecutive", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_two_writings_of_the_scale_rule_agree(hysteresis, consecutive):
    options = {"window": 3, "hysteresis": hysteresis, "consecutive": consecutive}
    plain = Scale(value=2.0**4, minimum=2.0, **options)
    tensors = DynamicScale(2.0**4, min_scale=2.0, **options)
    draw = random.Random(hysteresis)
    for _ in range(200):
        overflow = draw.random() < 0.3
        plain.update(overflow=overflow)
        tensors.update(torch.tensor(float(overflow)))
        assert tensors.scale.item() == plain.value


def test_untouched_parameters_decay_only_if_they_count_as_zeros():
    skipped = _run(CASES["unused"])
    zeros = _run(CASES["unused"], untouched="zeros")
    start = CASES["unused"].build().spare_block.up.weight
    assert torch.equal(skipped.params["spare_block.up.weight"], start)
    assert not torch.equal(zeros.params["spare_block.up.weight"], start)


def test_gradients_can_be_reduced_in_16_bit():
    wide = _run(MLP, precision="bf16", world=3)
    narrow = _run(MLP, precision="bf16", world=3, reduce_dtype=torch.bfloat16)
    assert wide.grad_norms != narrow.grad_norms
    assert_close_trajectory(narrow, wide, rtol=0.02)


def test_one_bit_of_difference_is_found():
    a, b = _run(MLP), _run(MLP)
    b.params["out.bias"][3] = torch.nextafter(b.params["out.bias"][3], torch.tensor(9.0))
    with pytest.raises(AssertionError, match=r"params out.bias: 1 of 23 elements differ, .*\[3\]"):
        assert_bit_equal(a, b)
    assert_close_trajectory(a, b, rtol=1e-6)


@pytest.mark.parametrize("spoil", ["losses", "grad_norms", "params", "nan", "steps", "skipped"])
def test_a_different_run_is_not_close(spoil):
    a, b = _run(MLP), _run(MLP)
    if spoil in ("losses", "grad_norms"):
        getattr(b, spoil)[1] *= 1.01
    if spoil == "params":
        b.params["out.bias"][3] += 0.1
    if spoil == "nan":
        b.losses[1] = float("nan")
    if spoil == "steps":
        b.losses.pop()
    if spoil == "skipped":
        b.skipped[0] = True
    with pytest.raises(AssertionError):
        assert_close_trajectory(a, b, rtol=1e-3)
    with pytest.raises(AssertionError):
        assert_close_trajectory(b, a, rtol=1e-3)


def test_a_case_of_ones_own_needs_three_functions():
    case = Case(build=lambda: Mlp(depth=1), make_batch=features, loss=mse, config={})
    assert len(_run(case, steps=2).losses) == 2
