"""Training on tensor ranks x data ranks is that of one process on the same global batch, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.covering import sampled
from support.tensor_models import PLANS, loss_of, tiny_gpt, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.initial_values import draw_values
from zeroshard.parallel.tensor_plan import tensor_parallel

STEPS, CLIP, LR = 4, 0.05, 1e-2
DATA, TENSOR = 2, 2


def one_process(model: nn.Module, accumulation: int) -> tuple[list[float], list[float]]:
    """Norms before clipping, and losses, of plain PyTorch; trains ``model``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    norms, losses = [], []
    for step in range(STEPS):
        found = []
        for micro in range(accumulation):
            for rank in range(DATA):
                ids, labels = tokens(seed_of(step, micro, rank))
                loss = loss_of(model(ids), labels) / (DATA * accumulation)
                loss.backward()
                found.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(sum(found))
        optimizer.step()
        optimizer.zero_grad()
    return norms, losses


def seed_of(step: int, micro: int, rank: int) -> int:
    return 100 * step + 10 * micro + rank


@pytest.mark.parametrize(
    ("stage", "plan", "tied", "accumulation", "meta"),
    sampled(
        [
            (stage, *how)
            for stage in (0, 1, 2, 3)
            for how in (("vocabulary", True, 1, True), ("sequence", False, 2, False))[
                :: 1 - stage % 2 * 2
            ]
        ],
        every=2,
    ),
)
@on_ranks(DATA * TENSOR)
def test_tensor_and_data_ranks_train_as_one_process(stage, plan, tied, accumulation, meta):
    with torch.device("meta" if meta else "cpu"):
        plain, model = tiny_gpt(tied=tied), tiny_gpt(tied=tied)
    draw_values(plain, 5)
    norms, losses = one_process(plain, accumulation)
    grid = init_device_mesh("cpu", (DATA, TENSOR), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, grid, PLANS[plan], seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=optimizer,
        mesh=Mesh(data_shard=DATA, tensor=TENSOR),
        config={
            "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": CLIP,
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
        },
    )
    with engine:
        rank = engine.mesh.dp_rank(dist.get_rank())
        for step in range(STEPS):
            found = 0.0
            for micro in range(accumulation):
                ids, labels = tokens(seed_of(step, micro, rank))
                loss = loss_of(engine(ids), labels)
                engine.backward(loss)
                engine.step()
                found += loss.item() / accumulation
            assert mean_over_data(found, grid["data"].get_group()) == pytest.approx(
                losses[step], rel=1e-12
            )
            assert engine.last_step.grad_norm == pytest.approx(norms[step], rel=1e-14)
            assert engine.last_step.grad_norm > CLIP
        expected = dict(plain.named_parameters())
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    assert own.keys() == expected.keys()
    for name, param in expected.items():
        error = (own[name] - param).abs().max() / param.abs().max()
        assert error <= 1e-12, f"{name}: {error}"


def mean_over_data(value: float, group: dist.ProcessGroup) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return total.item() / DATA


def test_the_reference_moves_every_parameter():
    model, before = tiny_gpt(), tiny_gpt()
    norms, _ = one_process(model, 1)
    assert min(norms) > CLIP
    moved: list[Tensor] = [
        (a - b).abs().max() for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert min(moved) > 1e-4
