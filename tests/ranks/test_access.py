"""Programs read and set gradients, masters, optimizer state and full parameters."""

from __future__ import annotations

import copy
import functools

import kit
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dots import Plain, assert_same, build, factor_of, open_engine, train
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard.errors import ShardedAccess, UsageError
from zeroshard.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

STAGES = [0, 1, 2, 3]
PRECISIONS = ["fp32", "bf16", "fp16"]
NAME = "dots.1.weight"


def coefficients(factor):
    """The gradient of a dot's weight under :class:`dots.Dot`."""
    return (torch.arange(91.0).view(13, 7) % 7 - 3) * factor


def mean_factor(step, world):
    return sum(factor_of(rank, step) for rank in range(world)) / world


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_full_gradient_is_the_mean_of_the_ranks_unscaled(stage, precision):
    with open_engine(stage, precision) as engine:
        p = engine.module.get_parameter(NAME)
        assert safe_get_full_grad(p) is None
        engine.backward(engine(factor_of(engine.global_rank, 0)))
        grad = safe_get_full_grad(p)
        assert grad.dtype == torch.float32
        assert torch.equal(grad, coefficients(mean_factor(0, 3)))
        assert safe_get_full_grad(engine.module.gain).item() == mean_factor(0, 3)
        with pytest.raises(UsageError, match="safe_get_full_grad"):
            p.grad.sum()
        engine.step()
        assert p.grad is safe_get_full_grad(p) is None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_gradient_during_accumulation_is_the_sum_so_far(stage, precision):
    with open_engine(stage, precision, gradient_accumulation_steps=4) as engine:
        p = engine.module.get_parameter(NAME)
        seen = 0.0
        for step in range(4):
            engine.backward(engine(factor_of(engine.global_rank, step)))
            seen += mean_factor(step, 2) / 4
            assert torch.equal(safe_get_full_grad(p), coefficients(seen))
            engine.step()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_reading_gradients_does_not_change_the_run(stage):
    runs = []
    for reads in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 17), nn.GELU(), nn.Linear(17, 3))
        keys = {"gradient_accumulation_steps": 3, "bf16": {"enabled": True}}
        with kit.engine(model.bfloat16(), stage, **keys) as engine:
            for step in range(6):
                engine.backward(engine(batch(step).bfloat16()).float().square().mean())
                if reads:
                    for p in engine.module.parameters():
                        safe_get_full_grad(p)
                        safe_get_full_fp32_param(p)
                        p.sum()
                engine.step()
            runs.append({n: p.clone() for n, p in engine.iter_full_params()})
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_full_gradient_where_the_caller_counts_micro_batches(stage):
    keys = {"managed_gradient_accumulation": False}
    with open_engine(stage, "fp32", **keys) as engine:
        p = engine.module.get_parameter(NAME)
        for step in range(2):
            engine(factor_of(engine.global_rank, step)).backward()
        expected = coefficients(mean_factor(0, 2) + mean_factor(1, 2))
        assert torch.equal(safe_get_full_grad(p), expected)
        engine.step()


@pytest.mark.smoke
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_set_gradient_is_what_the_step_uses(stage, precision):
    plain = Plain(precision, 2)
    with open_engine(stage, precision) as engine:
        p = engine.module.get_parameter(NAME)
        train(engine, range(1))
        plain.train(range(1))
        value = torch.linspace(-1, 1, 91).view(13, 7) + 1e-4  # not a 16-bit number
        engine.backward(engine(factor_of(engine.global_rank, 1)))
        safe_set_full_grad(p, value)
        torch.testing.assert_close(safe_get_full_grad(p), value, rtol=1e-6, atol=1e-9)
        engine.step()
        plain.train_with(1, {NAME: value})
        assert_same(engine, plain)
        train(engine, range(2, 3))
        plain.train(range(2, 3))
        assert_same(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradient_set_on_a_parameter_that_nobody_used_counts(stage):
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3, bias=False)})
    model.forward = lambda x: model["used"](x)
    optimizer = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    with kit.engine(model, stage, optimizer=optimizer) as engine:
        p = engine.module["unused"].weight
        before = safe_get_full_fp32_param(p)
        engine.backward(engine(torch.ones(2, 3)).sum())
        safe_set_full_grad(p, torch.ones(3, 3))
        engine.step()
        assert torch.equal(safe_get_full_fp32_param(p), before - 1)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_set_gradient_counts_in_norm_and_clipping(stage):
    with open_engine(stage, "fp32", gradient_clipping=1.0) as engine:
        engine.backward(engine(1.0))
        for p in engine.module.parameters():
            safe_set_full_grad(p, torch.zeros(p.shape))
        safe_set_full_grad(engine.module.gain, torch.tensor(4.0))
        engine.step()
        assert engine.last_step.grad_norm == 4.0
        assert engine.last_step.grad_norm_clipped == pytest.approx(1.0)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_setting_what_is_not_there_raises_on_every_rank(stage):
    with open_engine(stage) as engine:
        p, value = engine.module.get_parameter(NAME), torch.zeros(13, 7)
        bias = engine.module.get_parameter("dots.1.bias")  # wholly in one rank's shard
        with pytest.raises(UsageError, match="no reduced gradient"):
            safe_set_full_grad(p, value)
        for key in ("exp_avg", "momentum_buffer"):
            with pytest.raises(UsageError, match="none before its first step"):
                safe_set_full_optimizer_state(bias, torch.zeros(5), key)
        with pytest.raises(UsageError, match=r"shape \(7, 13\), expected \(13, 7\)"):
            safe_set_full_fp32_param(p, value.t())
        with pytest.raises(UsageError, match="a float, expected a tensor"):
            safe_set_full_fp32_param(p, 1.0)
        with pytest.raises(UsageError, match="does not belong to any open engine"):
            safe_get_full_grad(nn.Parameter(torch.ones(2)))
        train(engine, range(1))
        with pytest.raises(UsageError, match=r"'speed'.*\['exp_avg', 'exp_avg_sq', 'step'\]"):
            safe_set_full_optimizer_state(bias, torch.zeros(5), "speed")


# ---------------------------------------------------------------------- optimizer state, local pieces


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_optimizer_state_is_read_and_set_in_full(stage, precision):
    plain = Plain(precision, 2)
    with open_engine(stage, precision) as engine:
        params = dict(engine.module.named_parameters())
        assert safe_get_full_optimizer_state(params[NAME], "exp_avg") is None
        train(engine, range(2))
        plain.train(range(2))
        assert_same(engine, plain)
        for name, p in params.items():
            value = torch.full(p.shape, 0.125)
            safe_set_full_optimizer_state(p, value, "exp_avg_sq")
            plain.state(name, "exp_avg_sq").copy_(value)
            assert safe_get_full_optimizer_state(p, "step").item() == 2
        train(engine, range(2, 3))
        plain.train(range(2, 3))
        assert_same(engine, plain)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_local_pieces_reassemble_to_the_full_values(stage, precision):
    with open_engine(stage, precision) as engine:
        for p in engine.module.parameters():
            assert safe_get_local_optimizer_state(p, "exp_avg") is safe_get_local_grad(p) is None
        train(engine, range(1))
        engine.backward(engine(factor_of(engine.global_rank, 1)))
        for name, p in engine.module.named_parameters():
            for full, piece in (
                (safe_get_full_fp32_param(p), safe_get_local_fp32_param(p)),
                (safe_get_full_grad(p), safe_get_local_grad(p)),
                (
                    safe_get_full_optimizer_state(p, "exp_avg"),
                    safe_get_local_optimizer_state(p, "exp_avg"),
                ),
            ):
                pieces = [None] * 3
                dist.all_gather_object(pieces, piece)
                whole = torch.cat([piece for piece in pieces if piece is not None])
                if stage == 0:  # every rank updates everything
                    whole = whole[: p.numel()]
                assert torch.equal(whole, full.view(-1)), name


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_frozen_parameters_have_nothing_and_state_needs_a_name(stage):
    model = build()
    model.dots[2].requires_grad_(False)
    with kit.engine(model, stage) as engine:
        train(engine, range(1))
        engine.backward(engine(1.0))
        frozen = engine.module.dots[2].weight
        for read in (safe_get_full_grad, safe_get_local_grad, safe_get_full_fp32_param):
            assert read(frozen) is None
        assert safe_get_local_fp32_param(frozen) is None
        assert safe_get_full_optimizer_state(frozen, "exp_avg") is None
        assert safe_get_local_optimizer_state(frozen, "exp_avg") is None
        p = engine.module.get_parameter(NAME)
        piece = safe_get_local_optimizer_state(p, "exp_avg")
        if piece is None:  # another rank has all of it
            safe_set_local_optimizer_state(p, torch.zeros(0), "nothing")
        else:
            assert float(safe_get_local_optimizer_state(p, "step")) == 1.0
            strided = torch.stack([piece, piece * 2], 1)[:, 1]
            safe_set_local_optimizer_state(p, strided, "exp_avg")
            with pytest.raises(UsageError, match=r"no optimizer state 'nothing'.*'exp_avg'"):
                safe_set_local_optimizer_state(p, piece, "nothing")


@on_ranks(1)
def test_a_whole_piece_may_have_any_strides_and_a_scalar_is_one_beside_the_disk(tmp_path):
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    with open_engine(2, zero_optimization=disk) as engine:
        train(engine, range(1))
        p = engine.module.get_parameter(NAME)
        values = torch.arange(91.0).view(7, 13).t()
        safe_set_local_optimizer_state(p, values, "exp_avg")
        assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), values)
        assert safe_get_local_optimizer_state(p, "step").shape == ()


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_count_of_one_element_is_a_scalar(stage):
    with kit.engine(nn.Linear(1, 1), stage) as engine:
        engine.backward(engine(torch.ones(1, 1)).sum())
        engine.step()
        found = [
            safe_get_local_optimizer_state(engine.module.weight, n) for n in ("step", "exp_avg")
        ]
        shapes = [None if state is None else tuple(state.shape) for state in found]
        assert shapes in ([(), (1,)], [None, None])  # another rank has it
        assert shapes[0] == () or (stage, dist.get_rank()) == (2, 1)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_local_pieces_are_set_in_place(stage):
    values = torch.arange(91.0)
    with open_engine(stage) as engine:
        train(engine, range(1))
        engine.backward(engine(1.0))
        p = engine.module.get_parameter(NAME)
        if (piece := safe_get_local_grad(p)) is not None:
            begin = 64 * engine.global_rank if stage else 0  # the second rank has the rest
            own = values[begin:][: len(piece)]
            safe_set_local_grad(p, own)
            safe_set_local_optimizer_state(p, own / 2, "exp_avg")
        assert torch.equal(safe_get_full_grad(p), values.view(13, 7))
        assert torch.equal(safe_get_full_optimizer_state(p, "exp_avg"), values.view(13, 7) / 2)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_frozen_parameters_have_no_training_state_but_values(stage):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    with kit.engine(model, stage) as engine:
        p = engine.module[0].weight
        assert safe_get_full_fp32_param(p) is None
        assert safe_get_full_grad(p) is None
        with pytest.raises(UsageError, match="frozen"):
            safe_set_full_fp32_param(p, torch.zeros(4, 4))
        with GatheredParameters(p, modifier_rank=0):
            p.data.fill_(2 - dist.get_rank())
        assert p.sum().item() == 32
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        assert dict(engine.iter_full_params())["0.weight"].sum().item() == 32


# ---------------------------------------------------------------------- all parameters


def batch(step, rank=None, width=9, size=2):
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(size, width, generator=generator)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_all_full_parameters_are_streamed_under_their_own_names(stage):
    torch.manual_seed(1)
    model = Tied()
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    with kit.engine(model, stage) as engine:
        seen = {name: full.clone() for name, full in engine.iter_full_params()}
    assert sorted(seen) == sorted(truth)
    assert all(torch.equal(seen[name], truth[name]) for name in truth)


@on_ranks(2)
def test_streaming_holds_one_unit_at_a_time():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    with kit.engine(model, 3) as engine:
        ledger = engine.runtime.ledger
        unit_nbytes = max(unit.full_nbytes for unit in engine.runtime.units)
        before = ledger.nbytes("scratch")
        most, seen = 0, []

        def gather(original):
            assert all(earlier.expired() for earlier in seen)
            full_N = original()
            seen.append(StorageWeakRef(full_N.untyped_storage()))
            return full_N

        for unit in engine.runtime.units:
            unit.gathered_copy = functools.partial(gather, unit.gathered_copy)
        for _, full in engine.iter_full_params():
            most = max(most, ledger.nbytes("scratch") - before)
            del full
        assert most == unit_nbytes
        assert len(seen) == 6
        assert ledger.nbytes("scratch") == before
        assert ledger.nbytes("gathered") == 0


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_state_dict_holds_values_that_the_program_may_keep_and_write(stage):
    torch.manual_seed(1)
    model = Tied()
    truth = {name: value.clone() for name, value in model.state_dict().items()}
    with kit.engine(model, stage) as engine:
        state = engine.module.state_dict()
        assert list(state) == list(truth)
        assert all(torch.equal(state[name], truth[name]) for name in truth)
        assert all(type(value) is torch.Tensor for value in state.values())
        fresh = Tied()
        fresh.load_state_dict({name: v.clone() for name, v in state.items()}, assign=True)
        torch.optim.SGD(fresh.parameters(), lr=1.0).step()
        state["embed.weight"].clone().add_(1)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_deep_copy_of_the_model_belongs_to_no_engine(stage):
    """EMA, reference and target networks are made like this, and run on one rank only."""
    with kit.engine(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 4)), stage) as engine:
        engine.backward(engine(batch(0)).square().mean())
        engine.step()
        twin = copy.deepcopy(engine.module)
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        if dist.get_rank() == 0:
            assert all(type(p) is nn.Parameter for p in twin.parameters())
            twin(batch(1)).square().mean().backward()
            torch.optim.SGD(twin.parameters(), lr=0.1).step()
            assert not torch.equal(twin[0].weight, truth["0.weight"])
        engine.backward(engine(batch(1)).square().mean())
        engine.step()
    assert all(p.isfinite().all() for p in twin.parameters())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_after_close_whole_parameters_stay_and_sharded_ones_raise(stage):
    engine = open_engine(stage)
    train(engine, range(1))
    truth = {name: full.clone() for name, full in engine.iter_full_params()}
    engine.close()
    p = engine.module.get_parameter(NAME)
    assert p.shape == (13, 7)
    if stage < 3:
        assert torch.equal(p, truth[NAME])
        assert type(p) is nn.Parameter
        return
    assert "closed" in repr(p)
    for use in (
        lambda: p.sum(),
        lambda: engine.module(1.0),
        lambda: copy.deepcopy(engine.module),
        lambda: engine.module.state_dict(),
        lambda: p.data,
        lambda: p.tolist(),
        lambda: p.data.fill_(1),
    ):
        with pytest.raises(
            ShardedAccess, match=r"of shape \(.*\) was read after its engine was closed"
        ):
            use()
    with pytest.raises(ShardedAccess, match="closed"):
        p.detach_()
    for call in (safe_get_full_fp32_param, safe_get_full_grad, safe_get_local_grad):
        with pytest.raises(UsageError, match="does not belong to any open engine"):
            call(p)
    for call in (lambda: engine(1.0), lambda: list(engine.iter_full_params())):
        with pytest.raises(UsageError, match="engine was closed"):
            call()


# ---------------------------------------------------------------------- reading inside training


class Plainly:
    """One process on the global batch: the same model, AdamW."""

    def __init__(self, model):
        self.model = copy.deepcopy(model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, loss_of):
        """``loss_of(model, rank)``; the mean of both ranks' losses."""
        self.optim.zero_grad()
        (sum(loss_of(self.model, rank) for rank in range(2)) / 2).backward()
        self.optim.step()


def assert_close_to(engine, plain, after=""):
    truth = dict(plain.model.named_parameters())
    for name, full in engine.iter_full_params():
        torch.testing.assert_close(
            full, truth[name].detach(), rtol=1e-5, atol=1e-6, msg=lambda m: f"{after}: {m}"
        )


def small():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9))


LOSSES = {
    "weights in the loss": lambda f, m, x: (
        f(x).square().mean() + sum(p.norm() for p in m.parameters())
    ),
    "a weight used outside": lambda f, m, x: F.linear(f(x), m[0].weight, m[0].bias).square().mean(),
    "before the forward": lambda f, m, x: f(F.linear(x, m[4].weight)).square().mean(),
    "only outside": lambda f, m, x: F.linear(F.linear(x, m[0].weight).tanh(), m[2].weight).mean(),
    "several forwards": lambda f, m, x: (f(x) * f(x.flip(0))).mean() + f(f(x)).mean(),
    "stacked weights": lambda f, m, x: (
        (f(x) @ torch.stack([m[0].weight, m[2].weight])).square().mean()
    ),
    "weight times weight": lambda f, m, x: (f(x) @ m[0].weight @ m[0].weight.t()).mean(),
    "a submodule called directly": lambda f, m, x: f(x).mean() + m[2](x).square().mean(),
    "penalty on rows": lambda f, m, x: (
        f(x).square().mean() + sum(r.abs().sum() for r in m[2].weight)
    ),
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_flow_through_parameters_read_outside_their_module(stage):
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step, (name, loss) in enumerate([*LOSSES.items()] * 2):
            engine.backward(loss(engine, engine.module, batch(step)))
            engine.step()
            plain.step(lambda m, rank, step=step, loss=loss: loss(m, m, batch(step, rank)))
            assert_close_to(engine, plain, name)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gathering_between_forward_and_backward_and_in_hooks_changes_nothing(stage):
    model, norms = small(), []
    plain = Plainly(model)

    def hook(module, args, output):
        with GatheredParameters(module.parameters()):
            norms.append(module.weight.norm().item())
        with GatheredParameters(model[4].weight):
            norms.append(model[4].weight.norm().item())

    with kit.engine(model, stage) as engine:
        engine.module[0].register_forward_hook(hook)
        engine.module[2].register_forward_hook(hook)
        for step in range(3):
            loss = engine(batch(step)).square().mean()
            with GatheredParameters(engine.module.parameters()):
                norms.append(sum(p.norm().item() for p in engine.module.parameters()))
            engine.backward(loss)
            engine.step()
            plain.step(lambda m, rank, step=step: m(batch(step, rank)).square().mean())
        assert_close_to(engine, plain)
    assert len(norms) == 15


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_evaluating_between_steps_changes_nothing(stage, mode):
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step in range(3):
            engine.eval()
            with mode():
                seen = engine(batch(9, 0))
                torch.testing.assert_close(seen, plain.model(batch(9, 0)), rtol=1e-5, atol=1e-6)
                engine.module[2].weight.sum()
            engine.train()
            engine.backward(engine(batch(step)).square().mean())
            engine.step()
            plain.step(lambda m, rank, step=step: m(batch(step, rank)).square().mean())
        assert_close_to(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_forward_between_backward_and_step_leaves_no_old_values(stage):
    """A forward for metrics, with gradients enabled, keeps parameters full over the step."""
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step in range(3):
            engine.backward(engine(batch(step)).square().mean())
            engine(batch(7)).mean()
            engine.step()
            plain.step(lambda m, rank, step=step: m(batch(step, rank)).square().mean())
            torch.testing.assert_close(
                engine(batch(8)), plain.model(batch(8)), rtol=1e-5, atol=1e-6
            )
        assert_close_to(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_generation_with_uneven_lengths_in_a_synced_loop(stage):
    torch.manual_seed(1)
    model = Tied()
    twin = copy.deepcopy(model)
    with kit.engine(model, stage) as engine, torch.no_grad():
        ids, wanted = torch.tensor([[dist.get_rank() + 1]]), 3 + 4 * dist.get_rank()
        while True:
            done = torch.tensor(float(ids.shape[1] >= wanted))
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
            if done:
                break
            token = engine(ids)[:, -1].argmax(-1, keepdim=True)
            if ids.shape[1] < wanted:
                ids = torch.cat([ids, token], 1)
        alone = torch.tensor([[dist.get_rank() + 1]])
        while alone.shape[1] < wanted:
            alone = torch.cat([alone, twin(alone)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(ids, alone)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_through_one_engine_into_another(stage):
    """A GAN: the generator is trained through the discriminator, which is then trained separately."""
    torch.manual_seed(2)
    models = {"g": nn.Sequential(nn.Linear(9, 9), nn.Tanh()), "d": nn.Linear(9, 1)}
    plain = {name: Plainly(model) for name, model in models.items()}
    with kit.engine(models["g"], stage) as g, kit.engine(models["d"], stage) as d:
        for step in range(3):
            d.module.requires_grad_(False)
            g.backward(d(g(batch(step))).mean())
            g.step()
            d.module.requires_grad_(True)
            d.backward(d(g(batch(step)).detach()).square().mean())
            d.step()
            pg, pd = plain["g"], plain["d"]
            pg.step(lambda m, r, step=step, pd=pd: pd.model(m(batch(step, r))).mean())
            pd.optim.zero_grad()
            pd.step(
                lambda m, r, step=step, pg=pg: m(pg.model(batch(step, r)).detach()).square().mean()
            )
        assert_close_to(g, plain["g"])
        assert_close_to(d, plain["d"])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_backwards_over_one_graph(stage):
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step in range(2):
            loss = engine(batch(step)).square().mean()
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
            plain.step(lambda m, rank, step=step: 2 * m(batch(step, rank)).square().mean())
        assert_close_to(engine, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputation_in_a_backward_to_sharded_parameters_reads_true_values(reentrant):
    model = small()
    plain = Plainly(model)

    def loss_of(forward, m, x):
        def recomputed(y):
            return F.linear(y, m[0].weight).tanh() @ m[2].weight

        y = forward(x)
        return checkpoint(recomputed, y, use_reentrant=reentrant).square().mean()

    with kit.engine(model, 3) as engine:
        for step in range(2):
            if reentrant:  # cannot be combined with inputs=
                loss_of(engine, engine.module, batch(step)).backward()
                plain.step(lambda m, rank, step=step: loss_of(m, m, batch(step, rank)))
            else:
                loss = loss_of(engine, engine.module, batch(step))
                loss.backward(inputs=list(engine.module.parameters()))
                plain.step(lambda m, rank, step=step: loss_of(m, m, batch(step, rank)))
            engine.step()
        assert_close_to(engine, plain)


def with_penalty(forward, x):
    """Gradient penalty: the loss contains a gradient with respect to the input."""
    x = x.clone().requires_grad_()
    y = forward(x).square().mean()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return y + slope.square().sum()


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradient_penalty(stage, accumulation):
    model = small()
    plain = Plainly(model)

    def both(m, rank, step):
        parts = [with_penalty(m, batch(10 * step + i, rank)) for i in range(accumulation)]
        return sum(parts) / accumulation

    with kit.engine(model, stage, gradient_accumulation_steps=accumulation) as engine:
        for step in range(3):
            for i in range(accumulation):
                engine.backward(with_penalty(engine, batch(10 * step + i)))
                engine.step()
            plain.step(lambda m, rank, step=step: both(m, rank, step))
        assert_close_to(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_backward_to_chosen_parameters_only(stage):
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step in range(2):
            chosen = [engine.module[2].weight, engine.module[4].bias]
            engine(batch(step)).square().mean().backward(inputs=chosen)
            engine.step()
            plain.optim.zero_grad()
            losses = [plain.model(batch(step, rank)).square().mean() for rank in range(2)]
            (sum(losses) / 2).backward(inputs=[plain.model[2].weight, plain.model[4].bias])
            plain.optim.step()
        assert_close_to(engine, plain)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_gradients_asked_for_with_autograd_grad_do_not_count_in_the_step(stage):
    model = small()
    plain = Plainly(model)
    with kit.engine(model, stage) as engine:
        for step in range(2):
            x = batch(step)
            (seen,) = torch.autograd.grad(engine(x).mean(), engine.module[2].weight)
            (expected,) = torch.autograd.grad(plain.model(x).mean(), plain.model[2].weight)
            torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
            engine.backward(engine(x).square().mean())
            engine.step()
            plain.step(lambda m, rank, step=step: m(batch(step, rank)).square().mean())
        assert_close_to(engine, plain)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_step_after_an_exception_is_as_if_nothing_had_failed(stage, where):
    runs = []
    for fails in (False, True):
        fault = []

        def hook(module, *_, fault=fault):
            if fault:
                raise fault.pop()

        with kit.engine(small(), stage) as engine:
            for step in range(3):
                if fails:
                    fault.append(ValueError("bad sample"))
                    if where == "forward":
                        handle = engine.module[2].register_forward_pre_hook(hook)
                        with pytest.raises(ValueError, match="bad sample"):
                            engine(batch(step))
                    else:
                        loss = engine(batch(step)).square().mean()
                        handle = engine.module[2].weight.register_hook(hook)
                        with pytest.raises(ValueError, match="bad sample"):
                            engine.backward(loss)
                    handle.remove()
                engine.backward(engine(batch(step)).square().mean())
                engine.step()
            runs.append({n: p.clone() for n, p in engine.iter_full_params()})
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@on_ranks(2)
def test_double_backward_leaves_nothing_gathered():
    with kit.engine(small(), 3) as engine:
        engine.backward(with_penalty(engine, batch(0)))
        engine.step()
        assert engine.runtime.ledger.nbytes("gathered") == 0
