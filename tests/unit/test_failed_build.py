"""After an engine failed while it was built, the model trains in PyTorch or under another engine."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from kit import adamw, config
from torch import nn

from zeroshard import Engine
from zeroshard.engine import build, build_runtime
from zeroshard.errors import UsageError

FIRST, LAST = "OptimizerStep", "StateOffloader"  # what is made after the units, and after the hooks


def train(model: nn.Module) -> list[torch.Tensor]:
    """Parameters after three steps of plain PyTorch."""
    optimizer = adamw(model.parameters())
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


def fail(*_: object, **__: object) -> None:
    raise OSError("no memory left")


class SecondFails(build_runtime.Unit):
    made = 0

    def __init__(self, *args: object, **keys: object) -> None:
        SecondFails.made += 1
        if SecondFails.made == 2:
            fail()
        super().__init__(*args, **keys)


def break_build(patch: pytest.MonkeyPatch, part: str) -> None:
    """Let ``part`` fail while an engine is built; of several units the second."""
    if part == "Unit":
        patch.setattr(build_runtime, part, SecondFails)
    else:
        patch.setattr(build, part, fail)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("part", ["Unit", FIRST, LAST])
def test_a_model_trains_plainly_after_its_engine_failed(monkeypatch, stage, part):
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    monkeypatch.setattr(SecondFails, "made", 0)
    with monkeypatch.context() as patch:
        break_build(patch, part)
        with pytest.raises(OSError, match="no memory left"):
            Engine(model, config=config(stage, units=["0", "2"]), optimizer=adamw)
    gc.collect()
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    for trained, plain in zip(train(model), train(twin), strict=True):
        torch.testing.assert_close(trained, plain, rtol=0, atol=0)


@pytest.mark.parametrize("part", ["Unit", FIRST, LAST])
def test_another_engine_can_be_built_over_the_model(monkeypatch, part):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    monkeypatch.setattr(SecondFails, "made", 0)
    with monkeypatch.context() as patch:
        break_build(patch, part)
        with pytest.raises(OSError, match="no memory left"):
            Engine(model, config=config(2, units=["0", "1"]), optimizer=adamw)
    with Engine(model, config=config(2, units=["0", "1"]), optimizer=adamw) as engine:
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()


@pytest.mark.parametrize("part", ["nothing", FIRST, LAST])
def test_an_optimizer_that_an_engine_has_given_up_is_refused(monkeypatch, part):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    optimizer = adamw(model.parameters())
    if part == "nothing":
        Engine(model, config=config(2), optimizer=optimizer).close()
    else:
        with monkeypatch.context() as patch:
            patch.setattr(build, part, fail)
            with pytest.raises(OSError, match="no memory left"):
                Engine(model, config=config(2), optimizer=optimizer)
    with pytest.raises(UsageError, match="the optimizer has no parameters"):
        Engine(model, config=config(2), optimizer=optimizer)


def test_waiting_for_a_save_that_never_was_opens_no_connection(monkeypatch):
    with Engine(nn.Linear(8, 4), config=config(2), optimizer=adamw) as engine:
        monkeypatch.setattr(engine, "_make_savers", fail)
        engine.wait_for_checkpoint()
    engine.wait_for_checkpoint()
