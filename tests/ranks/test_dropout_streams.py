"""Dropout on tensor ranks: masks differ where activations are cut, and are equal elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.tensor_models import BLOCKS, loss_of, tiny_gpt, tokens
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.parallel.tensor_plan import tensor_parallel


class Drop(nn.Dropout):
    """Keeps its last mask."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = super().forward(torch.ones_like(x))
        return x * self.mask


class Dropping(nn.Module):
    """An MLP with dropout between its layers and after them."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.up, self.inside, self.down, self.after = mlp.up, Drop(0.5), mlp.down, Drop(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.down(self.inside(torch.relu(self.up(x)))))


def dropping() -> nn.Module:
    model = tiny_gpt()
    for block in model.blocks:
        block.mlp = Dropping(block.mlp)
    torch.manual_seed(7)
    return model.train()


def equal_on_ranks(tensor: Tensor) -> bool:
    rows = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, tensor.contiguous())
    return all(torch.equal(row, rows[0]) for row in rows)


@on_ranks(2)
def test_masks_differ_where_activations_are_cut():
    model = tensor_parallel(dropping(), init_device_mesh("cpu", (2,)), BLOCKS)
    ids, labels = tokens(1)
    for _ in range(2):
        loss_of(model(ids), labels).backward()
        for block in model.blocks:
            assert block.mlp.inside.mask.shape[-1] == 12
            assert not equal_on_ranks(block.mlp.inside.mask)
            assert equal_on_ranks(block.mlp.after.mask)
        assert equal_on_ranks(torch.get_rng_state())
    masks = [block.mlp.inside.mask for block in model.blocks]
    assert not torch.equal(*masks)  # each region has its own numbers
    state = torch.get_rng_state()
    model.eval()(ids)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_activation_checkpointing_draws_the_same_masks_again(reentrant):
    ids, labels = tokens(1)
    grads = []
    for checkpointed in (False, True):
        model = tensor_parallel(dropping(), init_device_mesh("cpu", (2,)), BLOCKS)
        if checkpointed:
            for block in model.blocks:
                block.forward = lambda x, inner=block.forward: checkpoint(
                    inner, x, use_reentrant=reentrant
                )
        loss_of(model(ids), labels).backward()
        grads.append([param.grad for param in model.parameters()])
        assert equal_on_ranks(torch.get_rng_state())
    for first, second in zip(*grads, strict=True):
        assert torch.equal(
            *(g.to_local() if hasattr(g, "to_local") else g for g in (first, second))
        )


@on_ranks(4)
def test_ranks_that_drop_train_without_a_disagreement():
    model = dropping()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": 2},
        "parallel": {"tensor": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }
    engine, *_ = zeroshard.initialize(model=model, config=config, plan=BLOCKS)
    with engine:
        torch.manual_seed(3 + engine.dp_rank)
        for step in range(3):
            ids, labels = tokens(10 * step + engine.dp_rank)
            engine.backward(loss_of(engine(ids), labels))
            engine.step()
