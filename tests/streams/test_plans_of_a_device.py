"""Plans for a GPU against runs on pretended GPUs: bytes on the device and in host memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import kit
import pytest
import torch
from support.remedies import Chain
from torch import Tensor
from zeroshard_testing import on_ranks
from zeroshard_testing.streams import pretend_cuda

from zeroshard import Engine
from zeroshard.core.mesh import Mesh
from zeroshard.core.tiers import TIERS
from zeroshard.planner.simulate import simulate
from zeroshard.planner.simulated import Simulation

WIDTH, DEPTH, TOKENS, RANKS, STEPS = 64, 8, 256, 2, 3

NUMBERS_NBYTES = 128
"""Scalars of a step, such as norms and fingerprints, that a run holds at other moments."""


def loss_of(output: Tensor, _labels: Any) -> Tensor:
    return output.float().square().mean()


def batch() -> Tensor:
    return torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)


def run(config: dict[str, Any]) -> tuple[int, dict[tuple[str, str], int], dict[str, int]]:
    """The peak of the last step on a pretended GPU, what states take, and the peaks of temporaries."""
    model = Chain(WIDTH, DEPTH)
    with (
        pretend_cuda(device_nbytes=1 << 30) as watch,
        watch.world(RANKS),
        Engine(model, config=config, device="cuda") as engine,
    ):
        for step in range(STEPS):
            if step == STEPS - 1:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(engine.gradient_accumulation_steps()):
                engine.backward(loss_of(engine(batch().to("cuda")), None))
                engine.step()
        ledger = engine.runtime.ledger
        states = {
            (kind, tier.name): ledger.nbytes(kind, tier)
            for kind in ("parameters", "master", "optimizer")
            for tier in TIERS.values()
        }
        peaks = {
            f"{kind}, {tier.name}": ledger.peak(kind, tier)
            for kind in ("gradients", "gathered", "buckets", "scratch")
            for tier in TIERS.values()
        }
        assert not watch.findings, "\n".join(map(str, watch.findings))
        return torch.cuda.max_memory_allocated(), states, peaks


def plan(config: dict[str, Any]) -> Simulation:
    mesh = Mesh(data_shard=RANKS)
    given = batch(), None
    return simulate(
        partial(Chain, WIDTH, DEPTH),
        config,
        given,
        mesh=mesh,
        rank=0,
        loss_fn=loss_of,
        steps=STEPS,
        target="cuda",
    )


CASES = [(0, "", 1), (1, "", 1), (3, "", 2)]
CASES += [(stage, "optimizer", many) for stage in (1, 2, 3) for many in (1, 2)]
CASES += [(3, "optimizer and parameters", many) for many in (1, 2)]


@pytest.mark.parametrize(("stage", "away", "accumulation"), CASES)
@on_ranks(1, group=False)
def test_a_gpu_holds_what_its_plan_says(stage, away, accumulation):
    to_host = {"device": "cpu"}
    zero = {"stage": stage} | ({"offload_optimizer": to_host} if away else {})
    zero |= {"offload_param": to_host} if "parameters" in away else {}
    config = kit.config(
        stage,
        "bf16",
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=1.0,
        unit_min_numel=1,
    )
    config["zero_optimization"] = zero
    peak, states, temporary = run(config)
    planned = plan(config)
    assert {key: n for key, n in states.items() if n} == {
        (row.category, row.tier): row.measured
        for row in planned.memory
        if row.category in ("parameters", "master", "optimizer") and row.measured
    }
    assert {name: n for name, n in temporary.items() if n} == {
        f"{row.category}, {row.tier}": row.measured
        for row in planned.memory
        if row.category in ("gradients", "gathered", "buckets", "scratch") and row.measured
    }
    assert abs(planned.peak_nbytes - peak) <= NUMBERS_NBYTES
