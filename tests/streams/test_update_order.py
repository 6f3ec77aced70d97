"""The update in device memory in one pass, on a pretended CUDA device. Triton's interpreter runs it."""

from __future__ import annotations

import pytest
import torch
from kit import engine
from scenarios import cuda, model
from stepwise import batch, loss_of, report
from torch import nn
from zeroshard_testing import on_ranks

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 only")


def train(stage, precision, device, watch=None):
    losses = []
    with engine(
        model(), stage, precision, optimizer=lambda params: torch.optim.AdamW(params, fused=True)
    ) as trained:
        for at in range(3):
            loss = loss_of(trained, batch(at, device, precision))
            trained.backward(loss)
            if watch is not None:
                watch.phase(f"update {at}")
            trained.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("stage", "ranks", "precision"),
    [
        (0, 1, "fp32"),
        (1, 1, "fp32"),
        (3, 1, "fp16"),  # the device decides whether a step is skipped
        (0, 4, "bf16"),
        (1, 4, "bf16"),
        (2, 4, "fp16"),
        (3, 4, "bf16"),
    ],
)
@on_ranks(1, group=False)
def test_it_comes_after_all_that_it_depends_on(stage, ranks, precision):
    from zeroshard_testing.triton_interpreter import interpreted

    expected = train(stage, precision, "cpu") if ranks == 1 else None
    with interpreted() as launches, cuda(ranks) as watch:
        losses = train(stage, precision, "cuda", watch)
        assert watch.findings == [], report(watch)
    assert [launch.kernel for launch in launches].count("update") > 0
    assert expected is None or losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(1, group=False)
def test_a_whole_step_moves_at_most_34_bytes_per_element_and_allocates_nothing(stage):
    """With the norm of the gradient, which reads 2."""
    from zeroshard_testing.triton_interpreter import interpreted

    layers = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)))
    numel = sum(param.numel() for param in layers.parameters()) // 4
    with (
        interpreted(),
        cuda(4) as watch,
        engine(
            layers,
            stage,
            "bf16",
            optimizer=lambda params: torch.optim.AdamW(params, fused=True),
        ) as trained,
    ):
        for at in range(3):
            trained.backward(loss_of(trained, torch.ones(2, 128).bfloat16().to("cuda")))
            with watch.phase(f"step {at}"):
                trained.step()
        units = len(trained.runtime.optimizer.shards)
        nbytes = sum(watch.traffic("step 2"))
        _, allocated = watch.allocations("step 2")
        launches = watch.kernels("step 2")["kernel"]
    assert 30 < nbytes / numel <= 34
    assert allocated < 1024
    assert launches == (2 * units if stage == 1 else 2)
