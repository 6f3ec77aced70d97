"""Layers that join several matrices: each tensor rank has a part of every one, and full means global."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fused_models import CLIP, LR, PLAN, everything, fused_gpt, settings
from support.tensor_models import loss_of, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from zeroshard_testing import on_ranks, run_ranks

import zeroshard
from zeroshard import Engine
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_plan import apply_plan
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_set_full_fp32_param,
)

EXACT = 1e-12


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("conv", [False, True])
@on_ranks(2)
def test_forward_and_gradients_are_those_of_one_process(conv):
    plain, cut = fused_gpt(conv=conv, tied=True), fused_gpt(conv=conv, tied=True)
    made = apply_plan(cut, init_device_mesh("cpu", (2,)), PLAN).plan
    assert made.fused["blocks.1.qkv_proj"] == (16, 8, 8)
    assert cut.head.weight is cut.embed.weight
    local = cut.blocks[0].qkv_proj.weight.to_local()
    assert local.shape == (16, 16)
    assert cut.blocks[0].gate_up.weight.to_local().shape == ((16, 12) if conv else (12, 16))
    for name, param in plain.named_parameters():
        assert torch.equal(whole(cut.get_parameter(name)), param), name
        assert torch.equal(whole(cut.state_dict()[name]), param), name
    ids, labels = tokens(1)
    losses = [loss_of(model(ids), labels) for model in (plain, cut)]
    assert abs(losses[0].item() - losses[1].item()) <= EXACT
    for loss in losses:
        loss.backward()
    for name, param in plain.named_parameters():
        grad = cut.get_parameter(name).grad
        if "qkv" in name or "gate_up" in name:  # autograd gives a plain DTensor
            sizes = cut.get_parameter(name).fused_sizes
            axis, rank = grad.placements[0].dim, dist.get_rank()
            own = [m.chunk(2, axis)[rank] for m in param.grad.split(sizes, axis)]
            found, expected = grad.to_local(), torch.cat(own, axis)
        else:
            found, expected = whole(grad), param.grad
        assert (found - expected).abs().max() <= EXACT * param.grad.abs().max(), name


@on_ranks(2)
def test_a_fused_weight_is_whole_or_an_error():
    model = fused_gpt()
    apply_plan(model, init_device_mesh("cpu", (2,)), PLAN)
    weight, plain = model.blocks[0].qkv_proj.weight, fused_gpt().blocks[0].qkv_proj.weight
    assert torch.equal(weight.redistribute(placements=[Replicate()]).to_local(), plain)
    assert weight.redistribute(placements=[Shard(0)]) is weight
    with pytest.raises(UsageError, match=r"joins matrices of the sizes \[16, 8, 8\]"):
        weight.redistribute(placements=[Shard(1)])


def train(engine: Engine, begin: int, end: int) -> list[float]:
    norms = []
    for step in range(begin, end):
        ids, labels = tokens(100 * step + engine.dp_rank)
        engine.backward(loss_of(engine(ids), labels))
        engine.step()
        norms.append(engine.last_step.grad_norm)
    return norms


def plainly(model: nn.Module, steps: int, dp_size: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-3)
    norms = []
    for step in range(steps):
        for rank in range(dp_size):
            ids, labels = tokens(100 * step + rank)
            (loss_of(model(ids), labels) / dp_size).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(4)
def test_training_is_that_of_one_process(stage):
    conv = stage in (1, 3)
    plain, model = fused_gpt(conv=conv, tied=True), fused_gpt(conv=conv, tied=True)
    norms = plainly(plain, 4, 2)
    config = settings(stage, parallel={"tensor": 2})
    engine, *_ = zeroshard.initialize(model=model, config=config, plan=PLAN)
    with engine:
        assert train(engine, 0, 4) == pytest.approx(norms, rel=1e-14)
        expected = dict(plain.named_parameters())
        for name, full in engine.iter_full_params():
            error = (full - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= EXACT, f"{name}: {error}"
        for name in ("blocks.0.qkv_proj.weight", "blocks.1.gate_up.bias"):
            param = model.get_parameter(name)
            assert torch.allclose(param.full_tensor(), expected[name], rtol=0, atol=EXACT)
            with GatheredParameters([param]):
                assert param.to_local().shape[0] <= expected[name].shape[0]
                assert torch.allclose(param.full_tensor(), expected[name], rtol=0, atol=EXACT)
            new = torch.randn(expected[name].shape, dtype=torch.float64)
            dist.broadcast(new, 0)
            safe_set_full_fp32_param(param, new)
            assert torch.equal(safe_get_full_fp32_param(param), new)


# ------------------------------------------------------------------ checkpoints


def opened(tensor: int, stage: int, conv: bool, **keys: Any) -> Engine:
    model = fused_gpt(conv=conv)
    engine, *_ = zeroshard.initialize(
        model=model,
        config=settings(stage, **keys, **({"parallel": {"tensor": tensor}} if tensor > 1 else {})),
        plan=PLAN,
    )
    return engine


def saves(tensor: int, stage: int, conv: bool, root: Path) -> None:
    with opened(tensor, stage, conv) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(root, "second")
        state = everything(engine)
        train(engine, 2, 4)
        later = everything(engine)
        if engine.global_rank == 0:
            torch.save((state, later), root.parent / "state.pt")


def loads(tensor: int, stage: int, conv: bool, root: Path, to: str, again: bool) -> None:
    with opened(tensor, stage, conv) as engine:
        engine.load_checkpoint(root, "second" if to == "elsewhere" else "elsewhere")
        state, later = torch.load(root.parent / "state.pt")
        found = everything(engine)
        assert [name for name in state if not torch.equal(found[name], state[name])] == []
        engine.save_checkpoint(root, to)
        if again:
            train(engine, 2, 4)
            found = everything(engine)
            assert [name for name in later if not torch.equal(found[name], later[name])] == []


@pytest.mark.parametrize("conv", [False, True])
def test_checkpoints_have_the_order_of_the_model(tmp_path, conv):
    root = tmp_path / "run"
    run_ranks(saves, 4, 2, 3, conv, root)
    run_ranks(loads, 2, 1, 1, conv, root, "elsewhere", False)
    run_ranks(loads, 4, 2, 3, conv, root, "back", True)
    state, _ = torch.load(tmp_path / "state.pt")
    for tag in ("second", "back"):
        with CheckpointReader(root / tag) as source:
            assert source.verify() == []
            for name, expected in state.items():
                if not name.endswith("exp_avg"):
                    out = torch.empty(expected.numel(), dtype=expected.dtype)
                    source.fill(name, "value", 0, out)
                    assert torch.equal(out.view(expected.shape), expected), name
            tensor = source.parameters["blocks.0.qkv_proj.weight"].tensors["value"]
            assert len(tensor.boxes) == 6  # two parts of each of q, k and v
