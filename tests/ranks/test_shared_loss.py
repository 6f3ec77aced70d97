"""One loss of several engines in fp16: each one's gradients carry its own loss scale."""

from __future__ import annotations

from functools import partial

import kit
import pytest
import torch
import torch.distributed as dist
from support.edge_case_models import CASES
from support.parity import Trajectory, assert_bit_equal
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError
from zeroshard.zero.gradients import _product

CASE = CASES["mlp"]
FACTORS = (1.0, 0.5)
"""Of each engine's loss in the sum."""


def opened(stage: int, precision: str = "fp16", micros: int = 1, **fp16):
    keys = {"fp16": {"enabled": True, **fp16}} if fp16 else {}
    keys |= {"gradient_accumulation_steps": micros, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    return kit.engine(CASE.build(), stage, precision, **keys)


def loss_of(engine, number: int):
    """Of a batch that depends on the rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    batch = CASE.make_batch(rank, 0, torch.Generator().manual_seed(10 * number + rank))
    dtype = next(engine.module.parameters()).dtype
    return CASE.loss(engine, [tensor.to(dtype) for tensor in batch])


def trained(engines, *, together: bool, micros: int = 1, steps: int = 3) -> list[Trajectory]:
    runs = [Trajectory() for _ in engines]
    for number in range(steps * micros):
        losses = [f * loss_of(e, number) for e, f in zip(engines, FACTORS, strict=True)]
        if together:
            engines[number % 2].backward(sum(losses))  # either of them
        else:
            for engine, loss in zip(engines, losses, strict=True):
                engine.backward(loss)
        for engine, run in zip(engines, runs, strict=True):
            engine.step()
            if engine.is_gradient_accumulation_boundary():
                run.grad_norms.append(engine.last_step.grad_norm if engine.last_step else 0.0)
    for engine, run in zip(engines, runs, strict=True):
        run.params = {name: full.clone() for name, full in engine.iter_full_params()}
        engine.close()
    return runs


@pytest.mark.parametrize(
    ("scales", "stages", "micros"),
    [((1024.0, 64.0), (0, 3), 2), ((64.0, 1024.0), (3, 1), 1), ((128.0, 128.0), (2, 2), 2)],
)
@on_ranks(2)
def test_a_shared_loss_gives_the_bits_of_separate_ones(scales, stages, micros):
    """Products with powers of two do not round."""

    def engines():
        pairs = zip(stages, scales, strict=True)
        return [opened(stage, micros=micros, loss_scale=scale) for stage, scale in pairs]

    together = trained(engines(), together=True, micros=micros)
    alone = trained(engines(), together=False, micros=micros)
    for run, expected in zip(together, alone, strict=True):
        assert_bit_equal(run, expected)


def test_a_quotient_of_scales_may_be_out_of_the_range_of_fp16():
    small = torch.full((2,), 2.0**-20, dtype=torch.float16)
    assert _product(small, torch.tensor(2.0**17)).tolist() == [0.125, 0.125]


@on_ranks(2)
def test_a_shared_loss_in_fp16_is_close_to_fp32():
    half = trained([opened(2, loss_scale=s) for s in (1024.0, 64.0)], together=True)
    single = trained([opened(2, "fp32"), opened(2, "fp32")], together=True)
    for run, expected in zip(half, single, strict=True):
        for name, values in expected.params.items():
            assert torch.allclose(run.params[name].float(), values, rtol=2e-2, atol=2e-3), name


@on_ranks(2)
def test_each_engine_skips_its_own_overflows_and_has_its_own_scale():
    """One begins far too high. The other one skips with it only until they are known to share a loss."""
    with (
        opened(2, initial_scale_power=24, hysteresis=1) as high,
        opened(3, initial_scale_power=10, hysteresis=1) as low,
    ):
        seen = []
        for number in range(12):
            high.backward(loss_of(high, number) + loss_of(low, number))
            for engine in (high, low):
                engine.step()
            seen.append([(e.last_step.skipped, e.last_step.loss_scale) for e in (high, low)])
        assert [skipped for _, (skipped, _) in seen] == [True] + [False] * 11
        assert [scale for _, (_, scale) in seen] == [1024.0] + [512.0] * 11
        skips = [skipped for (skipped, _), _ in seen]
        assert skips[:2] == [True, True]  # until its own gradients fit
        assert not skips[-1]
        assert [scale for (_, scale), _ in seen] == [
            2.0 ** (24 - sum(skips[:at])) for at in range(12)
        ]


def test_an_engine_that_is_closed_limits_no_other_scale():
    with opened(0, loss_scale=1024.0) as one:
        with opened(0, loss_scale=2.0) as other:
            one.backward(loss_of(one, 0) + loss_of(other, 0))
            one.step()
            other.step()
            assert one._sharing.begin() == 2
        assert one._sharing.begin() == 1024


def test_a_shared_loss_that_nothing_scales_is_refused_with_the_way_to_scale_it():
    with opened(0, loss_scale=64.0) as one, opened(0, loss_scale=64.0) as other:
        with pytest.raises(
            UsageError, match=r"A loss of several engines needs backward\(\) of one"
        ):
            (loss_of(one, 0) + loss_of(other, 0)).backward()
