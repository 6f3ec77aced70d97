"""Every elementwise optimizer trains sharded as it trains unsharded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from loops import (
    CASE,
    STAGES,
    assert_close,
    assert_same,
    open_engine,
    own_data,
    plain,
    train,
    weights,
)
from support.covering import some_stages
from support.parity import (
    assert_bit_equal,
    assert_close_trajectory,
    engine_run,
    make_batches,
    reference_run,
)
from torch import nn, optim
from zeroshard_testing import on_ranks

from zeroshard.optim.optimizers import Lamb, Lion

CLASSES = {
    "Adam": partial(optim.Adam, lr=1e-2, weight_decay=0.1),
    "AdamW": partial(optim.AdamW, lr=1e-2, amsgrad=True),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1),
    "SGD nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": partial(optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "RMSprop": partial(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True, eps=1e-3),
    "NAdam": partial(optim.NAdam, lr=1e-2, eps=1e-3),
    "RAdam": partial(optim.RAdam, lr=1e-2, eps=1e-3),
    "Adamax": partial(optim.Adamax, lr=1e-2, eps=1e-3),
    "Adadelta": partial(optim.Adadelta, lr=1.0),
    "Rprop": partial(optim.Rprop, lr=1e-2),
    "ASGD": partial(optim.ASGD, lr=1e-2, t0=1),
    "Lion": partial(Lion, lr=1e-2, weight_decay=0.1),
}


def over(make):
    return lambda named: make([p for _, p in named])


@pytest.mark.parametrize("name", CLASSES)
@on_ranks(2)
def test_elementwise_classes_equal_plain_pytorch_at_every_stage(name):
    make = over(CLASSES[name])
    batches = make_batches(CASE, steps=4, world=2)
    expected = reference_run(CASE, make, batches, clip=0.5, precision="fp64")
    runs = [
        engine_run(CASE, make, batches, stage=stage, clip=0.5, precision="fp64")
        for stage in some_stages(STAGES)
    ]
    assert_close_trajectory(runs[0], expected, rtol=1e-10)
    for run in runs[1:]:
        assert_bit_equal(run, runs[0])


def muon_by_hand(named):
    """torch's Muon on the matrices and AdamW on the rest, as one optimizer would."""
    matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
    return (
        optim.Muon(matrices, lr=1e-2, momentum=0.9, weight_decay=0.1),
        optim.AdamW(rest, lr=1e-3, weight_decay=0.1),
    )


class Embedded(nn.Module):
    """An embedding, which Muon leaves to AdamW, in front of the blocks."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 23)
        self.body = CASE.build()

    def forward(self, x):
        ids = (x[:, 0] > 0).long()
        return self.body(x + self.embed(ids))


def embedded():
    torch.manual_seed(0)
    return Embedded()


def muon_plain(world):
    model = embedded()
    optimizers = muon_by_hand(list(model.named_parameters()))
    for (ranks,) in make_batches(CASE, steps=3, world=world):
        for x, y in ranks:
            (nn.functional.mse_loss(model(x), y) / world).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def muon_sharded():
    section = {
        "type": "Muon",
        "params": {"muon_lr": 1e-2, "adam_lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1},
    }
    runs = []
    for stage in some_stages(STAGES):
        with open_engine(stage, model=embedded(), optimizer=section) as engine:
            train(engine, own_data(engine, 3))
            runs.append(weights(engine))
    for run in runs[1:]:
        assert_same(run, runs[0])
    return runs[0]


LAMB = {"lr": 1e-2, "weight_decay": 0.1, "max_coeff": 0.5}


def lamb_plain(world):
    """Whole parameters in one process; the class itself is checked against its formula elsewhere."""
    return plain(partial(Lamb, **LAMB), world=world)


@on_ranks(3)
def test_lamb_on_shards_equals_lamb_on_whole_parameters():
    runs = []
    for stage in some_stages(STAGES):
        with open_engine(stage, optimizer={"type": "Lamb", "params": LAMB}) as engine:
            train(engine, own_data(engine, 3))
            runs.append(weights(engine))
    assert_close(runs[0], lamb_plain(3), rtol=1e-5)
    for run in runs[1:]:
        assert_same(run, runs[0])


def test_muon_equals_torchs_on_one_rank():
    assert_close(muon_sharded(), muon_plain(1), rtol=1e-6)


@on_ranks(2)
def test_muon_equals_torchs_on_two_ranks():
    assert_close(muon_sharded(), muon_plain(2), rtol=3e-3)  # it orthogonalizes in bf16


@on_ranks(3)
def test_muon_equals_torchs_on_three_ranks():
    assert_close(muon_sharded(), muon_plain(3), rtol=3e-3)


@on_ranks(2)
def test_groups_keep_their_own_lr_and_decay():
    def groups(named):
        named = list(named)
        return optim.AdamW(
            [
                {"params": [p for n, p in named if "up" in n], "lr": 0.05, "weight_decay": 0.3},
                {"params": [p for n, p in named if "down" in n], "betas": (0.5, 0.9)},
                {"params": []},
                {"params": [p for n, p in named if "up" not in n and "down" not in n]},
            ],
            lr=1e-2,
            eps=1e-3,
            weight_decay=0.0,
        )

    batches = make_batches(CASE, steps=3, world=2)
    expected = reference_run(CASE, groups, batches, precision="fp64")
    for stage in some_stages(STAGES):
        run = engine_run(CASE, groups, batches, stage=stage, precision="fp64")
        assert_close_trajectory(run, expected, rtol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_parameters_that_the_optimizer_was_not_given_stay_as_they_were(stage):
    def some(named):
        return optim.SGD([p for n, p in named if "blocks.1" in n or "out" in n], lr=0.1)

    batches = make_batches(CASE, steps=2, world=2)
    run = engine_run(CASE, some, batches, stage=stage)
    before = dict(CASE.build().named_parameters())
    for name, value in run.params.items():
        given = "blocks.1" in name or "out" in name
        assert torch.equal(value, before[name]) is not given, name

    model = CASE.build()
    optimizer = some(list(model.named_parameters()))
    norms = []
    for (ranks,) in batches:
        for batch in ranks:
            (CASE.loss(model, batch) / 2).backward()
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.get_total_norm(held).item())
        optimizer.step()
        model.zero_grad()
    assert run.grad_norms == pytest.approx(norms, rel=1e-6)  # of the optimizer's parameters
    assert_close(run.params, {n: p.detach() for n, p in model.named_parameters()})
