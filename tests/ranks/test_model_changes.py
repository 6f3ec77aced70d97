"""Changes of the model after its engine was built: trained as in PyTorch, or an error."""

from __future__ import annotations

import copy
import gc

import kit
import pytest
import torch
import torch.distributed as dist
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError

STAGES = [0, 1, 2, 3]
OPTIONS = {"lr": 1e-2, "weight_decay": 0.01}


class Tower(nn.Module):
    """An embedding, two layers and a head, with attributes for parts that are added later."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def build():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Tower().double()


def loss_of(model, step, rank):
    tokens = torch.randint(7, (3, 4), generator=torch.Generator().manual_seed(10 * step + rank))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def engine_of(model, stage, *, params=None, client=False, **zero):
    params = list(model.parameters()) if params is None else params
    optimizer = {"type": "AdamW", "params": OPTIONS}
    if client:
        optimizer, params = torch.optim.AdamW(params, **OPTIONS), None
    return kit.engine(
        model,
        stage,
        optimizer=optimizer,
        model_parameters=params,
        train_micro_batch_size_per_gpu=3,
        zero_optimization=zero,
    )


def train(engine, steps):
    losses = []
    for step in steps:
        loss = loss_of(engine, step, dist.get_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def train_plain(model, optimizer, steps):
    """The losses of this rank's batches, of one process that trains on those of all."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for rank in range(dist.get_world_size()):
            loss = loss_of(model, step, rank)
            (loss / dist.get_world_size()).backward()
            losses += [loss.item()] if rank == dist.get_rank() else []
        optimizer.step()
    return losses


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_frozen_after_the_engine_was_built_and_unfrozen_again(stage):
    model, plain = build(), build()
    optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    with engine_of(model, stage) as engine:
        for steps, needs in [((0, 2), True), ((2, 4), False), ((4, 6), True)]:
            for half in (model, plain):
                half.embed.requires_grad_(needs)
                half.layers[0].requires_grad_(needs)
            found = train(engine, range(*steps))
            assert found == pytest.approx(train_plain(plain, optimizer, range(*steps)), rel=1e-12)


@pytest.mark.parametrize("client", [False, True])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_parameter_of_the_optimizer_that_was_frozen_at_first_is_not_ignored_later(stage, client):
    model = build()
    model.embed.requires_grad_(False)
    with engine_of(model, stage, client=client) as engine:
        train(engine, range(2))
        model.embed.requires_grad_(True)
        with torch.no_grad():
            engine(torch.ones(3, 4, dtype=torch.long))  # looking alone is no training
        before = {name: full.clone() for name, full in engine.iter_full_params()}
        engine.backward(loss_of(engine, 2, dist.get_rank()))
        with pytest.raises(UsageError, match=r"'embed.weight' .*frozen when the engine was built"):
            engine.step()
        assert all(torch.equal(full, before[name]) for name, full in engine.iter_full_params())
        engine.zero_grad()
        model.embed.requires_grad_(False)
        train(engine, range(2, 4))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_gradient_that_the_optimizer_was_never_to_use_is_the_programs_own(stage):
    model, plain = build(), build()
    for half in (model, plain):
        half.embed.requires_grad_(False)
    used = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(used, **OPTIONS)
    params = [p for p in model.parameters() if p.requires_grad]
    with engine_of(model, stage, params=params) as engine:
        for half in (model, plain):
            half.embed.requires_grad_(True)
        found = train(engine, range(3))
        assert found == pytest.approx(train_plain(plain, optimizer, range(3)), rel=1e-12)
        assert model.embed.weight.grad.shape == (7, 6)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_param_group_that_comes_later_is_refused(stage):
    with engine_of(build(), stage, client=True) as engine:
        train(engine, range(1))
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        engine.backward(loss_of(engine, 1, dist.get_rank()))
        with pytest.raises(
            UsageError, match=r"2 param groups, and had 1 when the engine was built"
        ):
            engine.step()


class Adapted(nn.Module):
    """A layer wrapped by another one, as adapters are."""

    def __init__(self, base: nn.Module, *, frozen: bool = False) -> None:
        super().__init__()
        self.base = base
        self.delta = nn.Parameter(torch.zeros(6, dtype=torch.float64), requires_grad=not frozen)

    def forward(self, x):
        return self.base(x) + self.delta


def add_head(model):
    model.second_head = nn.Linear(6, 7).double()


def add_parameter(model):
    model.layers[1].gain = nn.Parameter(torch.ones(6, dtype=torch.float64))


def wrap_layer(model):
    model.layers[0] = Adapted(model.layers[0])


def append_layer(model):
    model.layers.append(nn.Linear(6, 6).double())


def replace_weight(model):
    model.head.weight = nn.Parameter(torch.zeros(7, 6, dtype=torch.float64))


@pytest.mark.parametrize(
    "late", [add_head, add_parameter, wrap_layer, append_layer, replace_weight]
)
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_parameter_that_comes_after_the_engine_was_built_is_refused(stage, late):
    model = build()
    with engine_of(model, stage) as engine:
        train(engine, range(1))
        late(model)
        with pytest.raises(UsageError, match="was added to the model after the engine was built"):
            engine(torch.ones(3, 4, dtype=torch.long))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_what_comes_later_and_is_not_trained_changes_nothing(stage):
    model, plain = build(), build()
    optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    with engine_of(model, stage) as engine:
        model.layers[0] = Adapted(model.layers[0], frozen=True)
        model.metric = nn.Dropout()
        model.frozen = copy.deepcopy(plain.head).requires_grad_(False)
        found = train(engine, range(3))
        assert found == pytest.approx(train_plain(plain, optimizer, range(3)), rel=1e-12)
        del model.metric, model.frozen
        found = train(engine, range(3, 5))
        assert found == pytest.approx(train_plain(plain, optimizer, range(3, 5)), rel=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_evaluating_with_other_values_in_the_parameters_places(stage):
    model, other = build(), build()
    tokens = torch.arange(7)[None]
    with engine_of(model, stage) as engine, torch.no_grad():
        for param in other.parameters():
            param.mul_(1.5)
        values = dict(other.named_parameters())
        wanted = other(tokens)
        assert torch.equal(torch.func.functional_call(engine.module, values, (tokens,)), wanted)
        assert torch.equal(engine(tokens), build()(tokens))
        with torch.enable_grad():
            train(engine, range(2))


class Branching(Tower):
    """Every rank runs different layers."""

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.layers[int(tokens.sum()) % 2](x))


@pytest.mark.parametrize("how", ["in the configuration", "marked"])
@on_ranks(2)
def test_a_model_that_is_gathered_as_one_may_run_other_layers_on_each_rank(how):
    torch.manual_seed(1)
    model = Branching().double()
    plain = copy.deepcopy(model)
    zero = {"leaf_module": {"classes": ["Branching"]}} if how == "in the configuration" else {}
    if how == "marked":
        model._gathered_as_one = True
    optimizer = torch.optim.AdamW(plain.parameters(), **OPTIONS)
    with engine_of(model, 3, **zero) as engine:
        assert [unit.name for unit in engine.runtime.units] == ["root"]
        found = train(engine, range(6))
        assert found == pytest.approx(train_plain(plain, optimizer, range(6)), rel=1e-12)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_model_whose_engine_was_dropped_says_so(stage):
    model = build()
    engine = engine_of(model, stage)
    engine._watch.close()
    del engine
    gc.collect()
    with pytest.raises(UsageError, match="its engine was deleted without close"):
        model(torch.arange(3))
