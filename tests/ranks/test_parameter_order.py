"""Ranks may pass the same parameters in different orders, such as those of a Python set."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from dots import Dots, open_engine
from torch import Tensor, nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.deepspeed.helpers import safe_update_full_grad_vectorized
from zeroshard.deepspeed.zero_init import mark_parameters
from zeroshard.zero import GatheredParameters, Init, safe_get_full_fp32_param, safe_get_full_grad

CONFIG = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def own_order(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Each twice; on another rank in another order."""
    params = params * 2
    random.Random(100 + dist.get_rank()).shuffle(params)
    return params if dist.get_rank() else params[::-1]


def built(under: str) -> tuple[nn.Module, object]:
    """A sharded model with known values, and the object that keeps it sharded."""
    torch.manual_seed(7)
    if under == "an engine":
        engine = open_engine(3)
        return engine.module, engine
    with Init(config=CONFIG):
        return Dots(), None


def values_of(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model.parameters()):
        return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("under", ["an engine", "zero.Init"])
@on_ranks(2, timeout=30)
def test_values_gathered_in_another_order_on_each_rank_are_the_right_ones(under):
    model, _engine = built(under)
    wanted = values_of(model)
    with GatheredParameters(own_order(list(model.parameters()))):
        found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("under", ["an engine", "zero.Init"])
@on_ranks(2, timeout=30)
def test_edits_reach_all_ranks_whatever_the_order_of_the_list(under):
    model, _engine = built(under)
    with GatheredParameters(own_order(list(model.parameters())), modifier_rank=1), torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.fill_(10 * dist.get_rank() + number)
    for number, value in enumerate(values_of(model).values()):
        assert value.unique().tolist() == [10 + number]


@pytest.mark.parametrize("under", ["an engine", "zero.Init"])
@on_ranks(2, timeout=30)
def test_a_context_inside_another_leaves_the_outer_ones_values_whole(under):
    model, _engine = built(under)
    first, second, *_ = model.parameters()
    with GatheredParameters({first, second}, modifier_rank=0), torch.no_grad():
        with GatheredParameters([second, first], modifier_rank=1):
            first.fill_(1 + dist.get_rank())
        assert first.unique().tolist() == [2.0]  # already everybody's
        if dist.get_rank() == 0:  # alone: no collective may be called
            second.fill_(first.flatten()[0].item() + 3)
    found = list(values_of(model).values())
    assert found[0].unique().tolist() == [2.0]
    assert found[1].unique().tolist() == [5.0]


@pytest.mark.parametrize("under", ["an engine", "zero.Init"])
@on_ranks(2, timeout=30)
def test_all_gather_and_partition_of_a_list_in_another_order_on_each_rank(under):
    model, _engine = built(under)
    wanted = values_of(model)
    mark_parameters(model.parameters())
    some = next(model.parameters())
    some.all_gather(own_order(list(model.parameters())))
    assert torch.equal(some, wanted["gain"])
    with torch.no_grad():
        some.fill_(4.0)
    some.partition(own_order(list(model.parameters())), has_been_updated=True)
    for name, value in values_of(model).items():
        assert torch.equal(value, torch.tensor(4.0) if name == "gain" else wanted[name]), name


@on_ranks(2, timeout=30)
def test_an_operation_on_many_sharded_parameters_takes_them_in_any_order():
    model, _engine = built("an engine")
    params = own_order(list(model.parameters()))
    found = dict(zip(params, torch._foreach_norm(params), strict=True))
    for param, wanted in zip(model.parameters(), values_of(model).values(), strict=True):
        assert torch.equal(found[param], wanted.norm())


@on_ranks(2, timeout=30)
def test_gradients_of_a_list_are_updated_in_one_order():
    engine = open_engine(3)
    engine.backward(engine(1.0))
    params = list(engine.module.parameters())
    before = [safe_get_full_grad(param) for param in params]
    own = list(dict.fromkeys(own_order(params)))
    safe_update_full_grad_vectorized(own, lambda grad, param: grad * 2 + param.numel())
    for param, old in zip(params, before, strict=True):
        assert torch.equal(safe_get_full_grad(param), old * 2 + param.numel())


@on_ranks(2, timeout=30)
def test_model_parameters_may_be_a_set():
    runs = []
    for order in (list, own_order):
        torch.manual_seed(7)
        model = Dots()
        given = list(dict.fromkeys(order(list(model.parameters()))))
        settings = {**CONFIG, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        engine, *_ = zeroshard.initialize(model=model, model_parameters=given, config=settings)
        for step in range(2):
            engine.backward(engine(1.0 + step))
            engine.step()
        runs.append([safe_get_full_fp32_param(param) for param in model.parameters()])
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
