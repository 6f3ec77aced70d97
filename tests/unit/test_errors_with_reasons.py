"""What programs do with models and engines works as in plain PyTorch, or the error says what to do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.optim.optimizers import Lion
from zeroshard.zero.gathered import GatheredParameters


class _FrozenByFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0], None


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return self.c(_FrozenByFunction.apply(self.a(x), self.b.weight) + self.b.bias)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def made(kind):
    torch.manual_seed(0)
    return kind().double()


def opened(model, stage=0, **options):
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "unit_min_numel": 1,
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0, "steps_per_print": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    }  # fmt: skip
    if "optimizer" in options:
        del config["optimizer"]
    return zeroshard.initialize(model=model, config=config, **options)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", [Frozen, Scripted])
def test_a_gradient_that_is_none_and_a_scripted_module_train_as_in_torch(kind, stage):
    model, plain = made(kind), made(kind)
    torch_adam = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    engine = opened(model, stage)[0]
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(3, 4, dtype=torch.float64)
            engine.backward(engine(x).square().mean())
            engine.step()
            (plain(x).square().mean() / 2).backward()
        torch_adam.step()
        torch_adam.zero_grad()
    with GatheredParameters(list(model.parameters())):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), (ours - theirs).abs().max()
    engine.close()


def test_a_model_that_is_scripted_itself_is_refused():
    with pytest.raises(UsageError, match=r"of torch\.jit, which takes no hooks"):
        opened(torch.jit.script(nn.Linear(4, 4)))


def test_a_trunk_belongs_to_one_engine():
    trunk = nn.Linear(4, 4)
    first, second = (nn.Sequential(trunk, nn.Linear(4, 4)) for _ in range(2))
    engine = opened(first, 2)[0]
    with pytest.raises(UsageError, match=r"a part of model \(2 parameters\) already belongs to an"):
        opened(second, 2)
    engine.close()
    opened(second, 2)[0].close()


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
def test_an_engine_cannot_be_copied(copies):
    engine = opened(nn.Linear(4, 4))[0]
    with pytest.raises(UsageError, match="Engine cannot be copied or pickled"):
        copies(engine)
    engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_state_of_a_parameter_is_not_looked_up_in_the_optimizer(stage):
    model = nn.Linear(4, 4)
    engine, optimizer, *_ = opened(model, stage)
    by_index, by_get = (
        (lambda: optimizer.state[model.weight]),
        (lambda: optimizer.state.get(model.weight)),
    )
    for read in (by_index, by_get):
        with pytest.raises(UsageError, match="safe_get_full_optimizer_state"):
            read()
    assert optimizer.state.get("no tensor", 3) == 3
    engine.close()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def test_an_optimizer_without_complex_arithmetic_is_refused_with_the_way_to_train():
    with pytest.raises(
        UnsupportedError, match=r"Lion cannot update .* torch.complex64: .*view_as_real"
    ):
        opened(Complex(), optimizer=Lion)


def test_torchs_muon_is_told_of_ours():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = nn.Linear(4, 4, bias=False)
    with pytest.raises(UnsupportedError, match='"type": "Muon"'):
        opened(model, 1, optimizer=torch.optim.Muon(model.parameters()))


def test_small_names_of_deepspeed_have_their_values():
    from zeroshard import deepspeed
    from zeroshard.deepspeed import experts, import_hook

    model = nn.Linear(4, 4)
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 8},
        },
    )  # fmt: skip
    assert (optimizer.loss_scaler.cur_scale, optimizer.loss_scaler.loss_scale) == (8.0, 8.0)
    assert (engine._config.train_batch_size, engine._config.zero_config.stage) == (1, 1)
    engine.backward(engine(torch.ones(1, 4).half()).sum())
    engine.step()
    assert engine._global_grad_norm == engine.get_global_grad_norm() > 0
    engine.close()
    script = import_hook.module("utils.zero_to_fp32").__file__
    assert script is not None and Path(script).name == "zero_to_fp32.py" and Path(script).is_file()
    group = {"params": [model.weight], "name": "all"}
    split = experts.split_params_into_different_moe_groups_for_optimizer
    assert split(group) == [group] and split([group], max_group_size=1) == [group]
    assert experts.has_moe_layers(model) == (False, 0) and not experts.is_moe_param(model.weight)
