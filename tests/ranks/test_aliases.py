"""Tensors that share memory with parameters stay readable: never a signal, never foreign values."""

from __future__ import annotations

import copy
import io
import logging
import os

import kit
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from zeroshard_testing import on_ranks
from zeroshard_testing.ranks import run_ranks

from zeroshard.errors import NonFiniteError, ShardedAccess
from zeroshard.zero import GatheredParameters, safe_set_full_fp32_param
from zeroshard.zero.unit import Unit

RUNS = 50 if os.environ.get("ZEROSHARD_TEST_ALL") else 2
TRANSPORTS = ["shm", "p2p", "stock"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.w = nn.Parameter(torch.randn(8, 8) / 3)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + F.relu(self.linear(x)) @ self.w)


class Net(nn.Module):
    def __init__(self, kind=Block, num=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(num))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step):
    return torch.linspace(-1, 1, 40, dtype=torch.float64).view(5, 8) * (step + 1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05)


def plain_losses(kind, loss_of, steps):
    model = Net(kind).double()
    optimizer = sgd(model.parameters())
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, model(batch(step)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def open_engine(model, stage=3, **keys):
    return kit.engine(model.double(), stage, optimizer=sgd, units=["blocks.*"], **keys)


def step_of(engine, loss_of, step):
    loss = loss_of(engine.module, engine(batch(step)))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def mean_square(_model, output):
    return output.square().mean()


def assert_plain(losses, kind=Block, loss_of=mean_square):
    expected = plain_losses(kind, loss_of, range(len(losses)))
    torch.testing.assert_close(torch.stack(losses), expected, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- GatheredParameters


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_state_dict_taken_in_the_block_keeps_the_values_of_the_block(transport):
    with open_engine(Net(), transport=transport) as engine:
        losses = [step_of(engine, mean_square, 0)]
        with GatheredParameters(engine.module.parameters()):
            taken = engine.module.state_dict()
            alias = [p.detach().cpu().numpy() for p in engine.module.parameters()]
            data = [p.data for p in engine.module.parameters()]
            copies = {name: value.clone() for name, value in taken.items()}
        file = io.BytesIO()
        torch.save(taken, file)
        file.seek(0)
        for _ in range(2):
            for read in (taken, torch.load(file)):
                assert list(read) == list(copies)
                assert all(torch.equal(read[name], copies[name]) for name in copies)
            for a, b, name in zip(alias, data, copies, strict=True):
                assert torch.equal(torch.from_numpy(a), copies[name])
                assert torch.equal(b + 1, copies[name] + 1)
            file.seek(0)
            losses.append(step_of(engine, mean_square, len(losses)))
    assert_plain(losses)


@on_ranks(2)
def test_what_public_programs_save_loads_and_is_right():
    """Idioms of fine-tuning programs: one copy for each parameter; the dict of one head."""

    def maybe_zero_3(param):
        with GatheredParameters([param]):
            return param.data.detach().cpu().clone()

    with open_engine(Net()) as engine:
        step_of(engine, mean_square, 0)
        model = engine.module
        whole = {name: maybe_zero_3(p) for name, p in model.named_parameters()}
        with GatheredParameters(model.blocks[1].parameters()):
            head = model.blocks[1].state_dict()
        step_of(engine, mean_square, 1)
        file = io.BytesIO()
        torch.save([whole, head], file)
        file.seek(0)
        whole, head = torch.load(file)
    plain = Net().double()
    optimizer = sgd(plain.parameters())
    plain(batch(0)).square().mean().backward()
    optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(whole[name], value, rtol=1e-12, atol=1e-12)
        if name.startswith("blocks.1."):
            torch.testing.assert_close(head[name[9:]], value, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------- outside of blocks


def taken_from(weight):
    """Tensors that share the parameter's memory in plain PyTorch."""
    return [weight.data, weight.detach(), weight[1:], weight.t(), weight.view(-1), *weight.data[:2]]


READS = {
    "add": lambda t: t + 1,
    "clone": torch.clone,
    "item": lambda t: t.sum().item(),
    "iterate": lambda t: [*t],
    "copy": lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t),
    "numpy": lambda t: t.detach().numpy(),
    "deepcopy": lambda t: copy.deepcopy(t.detach()),
    "save": lambda t: torch.save(t.detach(), io.BytesIO()),
    "print": lambda t: f"{t} {t!r}",
}
STEP = ["step", "safe_set", "edit", "load"]


@pytest.mark.parametrize("change", STEP)
@on_ranks(2)
def test_a_tensor_that_is_older_than_its_parameters_values_is_not_read(change, tmp_path):
    with open_engine(Net()) as engine:
        weight = engine.module.blocks[1].w
        if change == "load":
            engine.save_checkpoint(tmp_path)
        step_of(engine, mean_square, 0)
        taken, cloned = taken_from(weight), weight.detach().clone()
        for read in READS.values():
            for tensor in taken:
                read(tensor)
        if change == "step":
            step_of(engine, mean_square, 1)
        elif change == "safe_set":
            safe_set_full_fp32_param(weight, torch.zeros_like(weight).float())
        elif change == "edit":
            with torch.no_grad(), GatheredParameters(weight, modifier_rank=0):
                weight.mul_(0.5)
        else:
            engine.load_checkpoint(tmp_path)
        for name, read in READS.items():
            for tensor in taken:
                with pytest.raises(ShardedAccess, match=r"before the parameter was updated.*clone"):
                    read(tensor)
                    pytest.fail(f"{name} of a tensor {tuple(tensor.shape)}")
        assert [tensor.shape for tensor in taken] and not torch.equal(weight, cloned)


@on_ranks(2)
def test_a_tensor_stays_readable_as_long_as_the_values_do_not_change():
    with open_engine(Net()) as engine:
        weight = engine.module.blocks[1].w
        step_of(engine, mean_square, 0)
        taken, values = taken_from(weight), weight.detach().clone()
        engine(batch(1)).sum().backward()
        with GatheredParameters(weight):
            taken[0] + 1
        engine.offload_states()
        taken[0] + 1
        engine.reload_states()
        assert torch.equal(taken[0], values)


# ---------------------------------------------------------------------- resident parameters


@pytest.mark.parametrize("optimizer", ["sgd", "AdamW", "offloaded"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(2)
def test_aliases_have_the_new_values_when_step_returns(stage, transport, optimizer):
    zero = {"offload_optimizer": {"device": "cpu"}} if optimizer == "offloaded" else {}
    chosen = sgd if optimizer == "sgd" else kit.ADAMW
    model = Net(num=30).double()
    keys = {"transport": transport, "zero_optimization": zero, "units": ["blocks.*"]}
    with kit.engine(model, stage, optimizer=chosen, **keys) as engine:
        for step in range(RUNS):
            if step == 0:
                alias = [p.data for p in engine.module.parameters()]
                kept = engine.module.state_dict()
            loss = engine(batch(step)).square().mean()
            engine.backward(loss)
            engine.step()
            seen = [a.clone() for a in reversed(alias)][::-1]
            listed = [value.clone() for value in kept.values()]
            for param, a, b in zip(engine.module.parameters(), seen, listed, strict=True):
                assert torch.equal(a, param.detach())
                assert torch.equal(b, a)
            if step == 1:
                assert all(unit.is_aliased for unit in engine.runtime.units)
        del alias, kept
        for _ in range(2):
            engine.backward(engine(batch(0)).square().mean())
            engine.step()
        assert not any(unit.is_aliased for unit in engine.runtime.units)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_aliases_stay_readable_while_states_are_offloaded(stage, ranks):
    run_ranks(read_while_offloaded, ranks, stage)


def read_while_offloaded(stage):
    with open_engine(Net(), stage) as engine:
        losses = [step_of(engine, mean_square, step) for step in range(2)]
        alias = [p.data for p in engine.module.blocks[1].parameters()]
        kept = engine.module.blocks[2].state_dict()
        losses.append(step_of(engine, mean_square, 2))
        values = [p.detach().clone() for p in engine.module.blocks[1].parameters()]
        listed = {name: p.clone() for name, p in engine.module.blocks[2].named_parameters()}
        engine.offload_states()
        units = [u for u in engine.runtime.units if u.resident]
        held = [u.name for u in units if u.full_N.untyped_storage().nbytes()]
        if units:
            assert {name[:8] for name in held} == {"blocks.1", "blocks.2"}
            assert all(torch.equal(a, value) for a, value in zip(alias, values, strict=True))
            assert all(torch.equal(kept[name], value) for name, value in listed.items())
        else:
            with pytest.raises(ShardedAccess, match="before the parameter was updated"):
                alias[0] + 1
        engine.reload_states()
        losses.append(step_of(engine, mean_square, 3))
        if units:
            news = engine.module.blocks[1].parameters()
            assert all(torch.equal(a, p) for a, p in zip(alias, news, strict=True))
            assert not torch.equal(alias[0], values[0])
        del alias, kept
        engine.offload_states()
        assert not any(u.full_N.untyped_storage().nbytes() for u in units)
        engine.reload_states()
        losses.append(step_of(engine, mean_square, 4))
    assert_plain(losses)


# ---------------------------------------------------------------------- kept by a forward


class Keeps(Block):
    def forward(self, x):
        output = super().forward(x)
        self.kept = self.linear.weight.detach(), self.w[2:4], self.norm.weight.data
        self.sums = [float(kept.sum()) for kept in self.kept]
        return output


@torch.no_grad()
def read_kept(model):
    for block in model.blocks:
        assert [float(kept.sum()) for kept in block.kept] == block.sums


@torch.no_grad()
def read_kept_after_an_update(model):
    """Each has the values of its forward or the new ones, or refuses its use."""
    for block in model.blocks:
        now = [float(p.sum()) for p in (block.linear.weight, block.w[2:4], block.norm.weight)]
        for kept, old, new in zip(block.kept, block.sums, now, strict=True):
            try:
                assert float(kept.sum()) in (old, new)
            except ShardedAccess as error:
                assert "before the parameter was updated" in str(error)


def reading(model, output):
    read_kept(model)
    return output.square().mean()


@pytest.mark.parametrize("reuse", [0, None])
@on_ranks(2)
def test_a_view_that_a_forward_keeps_has_its_values_until_they_are_updated(reuse):
    zero = {} if reuse is None else {"stage3_max_reuse_distance": reuse}
    with open_engine(Net(Keeps), zero_optimization=zero) as engine:
        losses = []
        for step in range(3):
            losses.append(step_of(engine, reading, step))
            read_kept_after_an_update(engine.module)
            with torch.no_grad():
                engine(batch(0))
            read_kept(engine.module)
    assert_plain(losses, Keeps, reading)


@on_ranks(2)
def test_one_line_says_that_what_a_forward_keeps_has_old_values():
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroshard")
    logger.addHandler(handler)
    try:
        with open_engine(Net()) as engine:
            step_of(engine, mean_square, 0)
            with GatheredParameters(engine.module.parameters()):
                wanted = [param.data for param in engine.module.parameters()]
            step_of(engine, mean_square, 1)
        assert wanted and not lines
        with open_engine(Net(Keeps)) as engine:
            for step in range(2):
                step_of(engine, mean_square, step)
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    assert "shares memory with parameters of unit 'blocks." in line


@on_ranks(2)
def test_a_storage_that_only_the_graph_holds_is_freed():
    left = []

    def leave(unit):
        left.append(unit.name)

    original, Unit._leave_storage = Unit._leave_storage, leave
    try:
        with open_engine(Net()) as engine:
            for step in range(3):
                step_of(engine, mean_square, step)
                with torch.no_grad():
                    engine(batch(step))
                loss = engine(batch(step)).sum()  # abandoned
            first, second = (engine(batch(step)).sum() for step in range(2))
            (first + second).backward(retain_graph=True)
            second.backward()
            with GatheredParameters(engine.module.parameters()):
                sum(p.sum() for p in engine.module.parameters())
            del loss
    finally:
        Unit._leave_storage = original
    assert not left


# ---------------------------------------------------------------------- readers without a version check


class Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.x, ctx.w = x, w.t()
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.w, ctx.x.t() @ grad


def identity_hooks():
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class Attributes(torch.autograd.Function):
    """Reads in backward what a program has written onto its parameter, as fused kernels do."""

    @staticmethod
    def forward(ctx, x, w, bias):
        ctx.save_for_backward(x, w, bias, w, None)
        return x @ w + bias

    @staticmethod
    def backward(ctx, grad):
        x, w, bias, again, nothing = ctx.saved_tensors
        assert again is w and nothing is None and isinstance(w, nn.Parameter)
        assert w.main_grad == "of the program" and not hasattr(bias, "main_grad")
        return grad @ w.t(), x.t() @ grad, grad.sum(0)


class FunctionWithAttributes(Block):
    def __init__(self):
        super().__init__()
        self.w.main_grad = "of the program"

    def forward(self, x):
        self.aux = Attributes.apply(x, self.w, self.norm.bias).square().mean()
        return Attributes.apply(super().forward(x), self.w, self.norm.bias)


class FunctionAside(Block):
    def forward(self, x):
        output = super().forward(x)
        self.aux = Plain.apply(x, self.w).square().mean()
        return output


class HooksAside(Block):
    def forward(self, x):
        output = super().forward(x)
        with identity_hooks():
            self.aux = ((x @ self.w) * self.norm.weight).square().mean()
        return output


class Hooks(Block):
    def forward(self, x):
        with identity_hooks():
            return super().forward(x)


class Aside(Block):
    def forward(self, x):
        output = super().forward(x)
        self.aux = ((x @ self.w) * self.norm.weight).square().mean()
        return output


def with_aux(model, output):
    return output.square().mean() + sum(block.aux for block in model.blocks)


class Collects(Block):
    """Gives tensors to a list of the program."""

    def forward(self, x):
        hidden = F.relu(self.linear(x)) @ self.w
        FOUND.append(hidden * self.norm.weight)
        return self.norm(x + hidden)


FOUND = []


def collected(_model, _output):
    loss = sum(found.square().mean() for found in FOUND[:3])
    FOUND.clear()
    return loss


PROGRAMS = {
    "function": (FunctionAside, with_aux),
    "attributes": (FunctionWithAttributes, with_aux),
    "hooks aside": (HooksAside, with_aux),
    "list": (Collects, collected),
    "hooks": (Hooks, mean_square),
    "aside": (Aside, with_aux),
}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
@on_ranks(2)
def test_every_reader_of_parameters_in_backward_gets_their_values(program, prefetch, transport):
    kind, loss_of = PROGRAMS[program]
    zero = {} if prefetch else {"stage3_prefetch_bucket_size": 0}
    for _ in range(RUNS):
        with open_engine(Net(kind), transport=transport, zero_optimization=zero) as engine:
            if program == "hooks aside":
                with pytest.raises(NonFiniteError, match=r"saved_tensors_hooks .*clone"):
                    step_of(engine, loss_of, 0)
                continue
            losses = [step_of(engine, loss_of, step) for step in range(3)]
        assert_plain(losses, kind, loss_of)


@on_ranks(2)
def test_features_of_inner_layers_are_trained_without_the_last_output():
    """As a perceptual loss takes them: no output of a wrapped module is in the loss."""

    def losses_of(train):
        model = Net().double()
        features = []
        for block in model.blocks:
            block.linear.register_forward_hook(lambda _m, _a, output: features.append(output))

        def loss_of(model, _output):
            loss = sum(feature.square().mean() for feature in features)
            features.clear()
            return loss

        return train(model, loss_of)

    def plainly(model, loss_of):
        optimizer, losses = sgd(model.parameters()), []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, model(batch(step)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    def sharded(model, loss_of):
        with open_engine(model) as engine:
            return torch.stack([step_of(engine, loss_of, step) for step in range(3)])

    expected = losses_of(plainly)
    torch.testing.assert_close(losses_of(sharded), expected, rtol=1e-12, atol=1e-12)
