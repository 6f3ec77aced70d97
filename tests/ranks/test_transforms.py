"""Sharded parameters under ``torch.func``: as in plain PyTorch, or an error that says what to do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from loops import open_engine
from torch import nn
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacrev,
    jvp,
    vjp,
    vmap,
)
from torch.utils._pytree import tree_leaves
from zeroshard_testing import on_ranks

from zeroshard.errors import ShardedAccess


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.b = nn.Linear(6, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def net():
    torch.manual_seed(0)
    return Net()


engine_of = partial(
    open_engine, units=["Linear"], zero_optimization={"stage3_max_reuse_distance": 0}
)


def loss(model, params, x):
    return functional_call(model, params, (x,)).square().sum()


def detached(model):
    return {name: param.detach() for name, param in model.named_parameters()}


TRANSFORMS = {
    "grad of parameters": lambda m, x: grad(lambda p: loss(m, p, x))(detached(m)),
    "grad and value": lambda m, x: grad_and_value(lambda p: loss(m, p, x))(detached(m)),
    "gradient of each sample": lambda m, x: vmap(
        grad(lambda p, row: loss(m, p, row)), in_dims=(None, 0)
    )(detached(m), x),
    "vmap of the model": lambda m, x: vmap(m)(x),
    "grad of inputs": lambda m, x: grad(lambda x: m(x).sum())(x),
    "vmap of grad": lambda m, x: vmap(grad(lambda x: m(x).sum()))(x),
    "jacrev": lambda m, x: jacrev(m)(x[0]),
    "hessian": lambda m, x: hessian(lambda x: m(x).sum())(x[0]),
    "vjp": lambda m, x: vjp(m, x)[1](torch.ones(3, 5)),
    "jvp": lambda m, x: jvp(m, (x,), (torch.ones_like(x),)),
    "a parameter in a closure": lambda m, x: grad(
        lambda x: F.linear(x, m.a.weight, m.a.bias).sum()
    )(x),
    "vmap over a closure": lambda m, x: vmap(lambda x: F.linear(x, m.a.weight[:], m.a.bias))(x),
}


@on_ranks(2)
def test_transforms_give_what_plain_pytorch_gives():
    plain, x = net(), torch.linspace(-1, 1, 15).view(3, 5)
    with engine_of(3, model=net()) as engine:
        for name, transform in TRANSFORMS.items():
            with torch.no_grad():
                engine(x)  # everything is sharded again
            expected, got = (
                tree_leaves(transform(plain, x)),
                tree_leaves(transform(engine.module, x)),
            )
            for a, b in zip(expected, got, strict=True):
                assert torch.equal(a.detach(), b.detach()), name


@on_ranks(2)
def test_training_goes_on_after_a_transform():
    x = torch.linspace(-1, 1, 15).view(3, 5)
    losses = []
    for transforms in ({}, TRANSFORMS):
        losses.append([])
        with engine_of(3, model=net()) as engine:
            for _ in range(2):
                for transform in transforms.values():
                    transform(engine.module, x)
                value = engine(x).square().mean()
                engine.backward(value)
                engine.step()
                losses[-1].append(value.item())
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_sharded_parameter_given_to_a_transform_is_refused():
    x = torch.ones(3, 5)
    with engine_of(3, model=net()) as engine:
        module = engine.module
        with pytest.raises(ShardedAccess, match=r"'a\.weight'.*torch\.func.*p\.detach\(\)"):
            grad(lambda p: loss(module, p, x))(dict(module.named_parameters()))


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_gradients_land_through_vmap(stage):
    """The transform is inside the graph that is trained."""
    x = torch.linspace(-1, 1, 15).view(3, 5)
    losses = []
    for forward in (lambda engine: engine(x), lambda engine: vmap(engine.module)(x)):
        with engine_of(stage, model=net()) as engine:
            for _ in range(3):
                loss = forward(engine).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-6)
    assert losses[0] != losses[2]
