"""Each tensor rank keeps a part of what activation checkpointing saves, and gradients keep their bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.tensor_models import PLANS, loss_of, tiny_gpt, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing import on_ranks

from zeroshard.deepspeed import activations
from zeroshard.deepspeed.entry import initialize
from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_plan import tensor_parallel


class Checkpointed(nn.Module):
    """A block whose activations are recomputed."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.run = activations.checkpoint if reentrant else activations.non_reentrant_checkpoint

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


@contextmanager
def census() -> Iterator[list[Tensor]]:
    """What checkpointing keeps, as it is packed."""
    kept: list[Tensor] = []
    made = activations.PartitionedActivations._pack

    def packing(self, saved: Tensor):
        packed = made(self, saved)
        kept.append(packed if isinstance(packed, Tensor) else packed.part)
        return packed

    activations.PartitionedActivations._pack = packing
    try:
        yield kept
    finally:
        activations.PartitionedActivations._pack = made


def build(plan: str, reentrant: bool, stage: int = 2):
    model = tiny_gpt().float()
    if dist.get_world_size() > 1:
        sizes = (dist.get_world_size() // 2, 2)
        grid = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        tensor_parallel(model, grid, PLANS[plan])
    model.blocks = nn.ModuleList(Checkpointed(block, reentrant) for block in model.blocks)
    engine, *_ = initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 3,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
            "parallel": {"tensor": 2},
            "activation_checkpointing": {"partition_activations": True},
        },
    )
    return engine


def train(engine, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        ids, labels = tokens(10 * step + engine.dp_rank)
        engine.backward(loss_of(engine(ids), labels))
        engine.step()
    return {name: values.clone() for name, values in engine.iter_full_params()}


def forget() -> None:
    """Leave no configuration to the next test of this process: it would gather over other groups."""
    activations._settings.clear()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_gradients_keep_their_bits_and_a_rank_keeps_half(stage, reentrant):
    found = []
    for partitions in (False, True):
        engine = build("vocabulary", reentrant, stage)
        activations.configure(None, partition_activations=partitions)
        with engine, census() as kept:
            found.append(train(engine))
        sizes = [part.numel() for part in kept]
        assert sizes == ([3 * 8 * 16 // 2] * 4 if partitions else [])  # two blocks, two steps
        assert all(part.untyped_storage().nbytes() == part.nbytes for part in kept)
    assert all(torch.equal(values, found[1][name]) for name, values in found[0].items())
    forget()


@on_ranks(2)
def test_the_key_of_the_configuration_counts_and_inputs_that_differ_are_an_error():
    engine = build("sequence", False)
    activations.configure(None, deepspeed_config=engine.config)
    with engine:
        ids, labels = tokens(0)
        loss = loss_of(engine(ids), labels)
        with pytest.raises(UsageError, match=r'partition_activations: .* style "sequence"'):
            engine.backward(loss)
    forget()


class Mpu:
    """Both ranks are tensor ranks."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self):
        return dist.group.WORLD


@on_ranks(2)
def test_tensors_of_any_shape_dtype_and_order_come_back():
    activations.configure(Mpu(), partition_activations=True)
    torch.manual_seed(0)
    inputs = [
        torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(5, 3).t().bfloat16().requires_grad_(),  # transposed: parts of the memory order
        torch.randn(1, requires_grad=True),  # too small
        torch.randn(3, 1).expand(3, 5).requires_grad_(),  # elements at one place
        torch.ones(3, 5, dtype=torch.bool),
        torch.arange(7),
    ]
    strides = [x.stride() for x in inputs]
    seen: list[tuple[int, ...]] = []

    def block(a, b, c, d, mask, index):
        seen[:] = [x.stride() for x in (a, b, c, d, mask, index)]
        return (a * b * c + d).masked_fill(~mask, 0).tanh() + index.sum()

    with census() as kept:
        out = activations.non_reentrant_checkpoint(block, *inputs[:-1], index=inputs[-1])
    assert [part.numel() for part in kept] == [8, 8, 1, 15, 8, 4]
    seen.clear()
    out.sum().backward()
    assert seen == strides
    found = [x.grad.clone() for x in inputs[:4]]
    for x in inputs[:4]:
        x.grad = None
    block(*inputs).sum().backward()
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs[:4], found, strict=True))
    forget()


@on_ranks(1)
def test_one_rank_keeps_its_activations_whole():
    activations.configure(None, partition_activations=True)
    x = torch.randn(4, requires_grad=True)
    with census() as kept:
        activations.checkpoint(torch.sin, x).sum().backward()
    assert not kept
    assert torch.equal(x.grad, torch.cos(x.detach()))
    forget()
