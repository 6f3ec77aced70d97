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


HALVES = ("first", "second")


def stages_of(half: str, accumulation: int) -> tuple[int, int]:
    """Two stages whose runs have equal bits; both halves together are all stages."""
    if accumulation == 1:
        return {"first": (0, 3), "second": (1, 2)}[half]
    return {"first": (0, 1), "second": (2, 3)}[half]  # each pair adds gradients in the same buffer


def check_stages(
    stages: tuple[int, int], name: str, precision: str, accumulation: int, *, world: int
) -> None:
    """Both stages have the same bits and are close to plain PyTorch."""
    runs = [trained(name, precision, accumulation, stage=s, world=world) for s in stages]
    expected = oracle(name, precision, accumulation, world=world, rounds_sum=True)
    for run in runs:
        assert_close_trajectory(run, expected, rtol=TOLERANCE[precision])
    assert_bit_equal(*runs)
