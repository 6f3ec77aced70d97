"""If parameters are not as they were in forward, backward raises an error and never gives a number."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from loops import open_engine
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError
from zeroshard.zero.hooks import StepHooks


class LeavesALoss(nn.Linear):
    """Its output does not depend on what it leaves in an attribute."""

    def forward(self, x):
        hidden = super().forward(x)
        self.aux = super().forward(super().forward(hidden.detach())).square().mean()
        return hidden


class Net(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.layers = nn.ModuleList(LeavesALoss(6, 6) for _ in range(3))
        for layer in self.layers:
            layer.weight.requires_grad_(not frozen)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


engine_of = partial(
    open_engine, units=["layers.*"], zero_optimization={"stage3_max_reuse_distance": 0}
)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_a_loss_left_in_an_attribute_of_a_sharded_unit_is_trained(frozen):
    """Backward reaches none of the outputs of the unit."""
    losses = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = Net(frozen)
        with engine_of(stage, model=model) as engine:
            for _ in range(3):
                engine(torch.ones(2, 6))
                loss = model.layers[0].aux + model.layers[2].aux
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


@on_ranks(2)
def test_a_loss_left_in_an_attribute_counts_where_its_graph_joins_an_output():
    """As routers of experts do it: the graph of both is one when the parameters are read."""
    torch.manual_seed(0)
    losses = []
    for stage in (2, 3):
        torch.manual_seed(0)
        model = Router()
        with engine_of(stage, model=model) as engine:
            for _ in range(3):
                loss = engine(torch.ones(2, 6)).square().mean()
                engine.backward(loss + sum(layer.aux for layer in model.layers))
                engine.step()
                losses.append(loss.item())
    assert losses[:3] == losses[3:]


class Router(Net):
    class Layer(nn.Linear):
        def forward(self, x):
            scores = super().forward(x).softmax(-1)
            self.aux = scores.square().mean()
            return x * scores

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(6, 6) for _ in range(3))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_graph_from_before_the_update_is_refused_as_in_pytorch(stage):
    torch.manual_seed(0)
    with engine_of(stage, model=Router()) as engine:
        loss = engine(torch.ones(2, 6)).square().mean()
        engine.backward(loss, retain_graph=True)
        engine.step()
        with pytest.raises(UsageError, match=r"updated between forward and backward"):
            engine.backward(loss)


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_backward_through_a_unit_that_nobody_gathered_is_refused(frozen):
    """A second check, below the hooks: without hooks backward raises. It gives no number and does
    not crash."""
    torch.manual_seed(0)
    model = Net(frozen)
    without_hooks = mock.patch.object(StepHooks, "_before_backward", lambda *_: None)
    refused = pytest.raises(UsageError, match="backward needs a tensor that was changed")
    with engine_of(3, model=model) as engine, without_hooks, refused:
        engine.backward(engine(torch.ones(2, 6)).square().mean())
