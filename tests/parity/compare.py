"""The common part of parity tests: train a case at some stages and compare it with plain PyTorch."""

from __future__ import annotations

from support import edge_case_models
from support.parity import (
    DTYPES,
    Scale,
    Trajectory,
    adamw,
    assert_bit_equal,
    assert_close_trajectory,
    engine_run,
    make_batches,
    reference_run,
)

CASES = sorted(edge_case_models.CASES)
STAGES = (0, 1, 2, 3)
COMBINATIONS = [("fp64", 3), ("fp32", 1), ("bf16", 1), ("bf16", 3), ("fp16", 3)]
"""Precision and micro-batches in a step."""
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 6e-2, "fp16": 2e-2}
"""Relative. 16 bit: ranks' sums are rounded once where one process sums in fp32."""


def loss_scale(precision: str) -> Scale | None:
    return Scale(dynamic=False, value=1024.0) if precision == "fp16" else None


def oracle(
    name: str, precision: str, accumulation: int, *, world: int, rounds_sum: bool, clip: float = 0.3
) -> Trajectory:
    """Plain PyTorch. ``rounds_sum``: 16-bit gradients are rounded after summing micro-batches."""
    case = edge_case_models.CASES[name]
    return reference_run(
        case,
        adamw(),
        make_batches(case, steps=3, world=world, accumulation=accumulation),
        clip=clip,
        precision=precision,
        scale=loss_scale(precision),
        reduce_dtype=DTYPES[precision] if rounds_sum and precision in ("bf16", "fp16") else None,
    )


def trained(
    name: str,
    precision: str,
    accumulation: int,
    *,
    stage: int,
    world: int,
    clip: float = 0.3,
    config: dict | None = None,
) -> Trajectory:
    """The same training with the engine, on this rank."""
    case = edge_case_models.CASES[name]
    return engine_run(
        case,
        adamw(),
        make_batches(case, steps=3, world=world, accumulation=accumulation),
        stage=stage,
        clip=clip,
        precision=precision,
        scale=loss_scale(precision),
        config=config,
    )


def check_all_stages(name: str, precision: str, accumulation: int, *, world: int) -> None:
    """Stages that accumulate gradients in the same buffer are bit-equal. All are close to plain
    PyTorch."""
    runs = {s: trained(name, precision, accumulation, stage=s, world=world) for s in STAGES}
    expected = oracle(name, precision, accumulation, world=world, rounds_sum=True)
    for stage in STAGES:
        assert_close_trajectory(runs[stage], expected, rtol=TOLERANCE[precision])
    assert_bit_equal(runs[1], runs[0])
    assert_bit_equal(runs[3], runs[2])
    if accumulation == 1:
        assert_bit_equal(runs[2], runs[1])
