"""The loss scale, compared with a plain implementation of its rule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.precision.loss_scaler import DynamicScale, LossScaler, scaler_from

OVERFLOW, GOOD = torch.tensor(1.0), torch.tensor(0.0)


class Rule:
    """The dynamic rule with Python numbers, as published."""

    def __init__(self, scale, window, hysteresis, consecutive, min_scale):
        self.scale, self.window, self.hysteresis = scale, window, hysteresis
        self.consecutive, self.min_scale = consecutive, min_scale
        self.n, self.last, self.budget, self.at_floor = 0, -1, hysteresis, False

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.budget == 1:
                self.at_floor |= self.scale == self.min_scale
                self.scale = max(self.scale / 2, self.min_scale)
            else:
                self.budget -= 1
            self.last = self.n
        else:
            if self.consecutive:
                self.budget = self.hysteresis
            good = self.n - self.last - 1
            if good > 0 and good % self.window == 0:
                self.scale *= 2
                if not self.consecutive:
                    self.budget = self.hysteresis
        self.n += 1


@settings(max_examples=150, deadline=None)
@given(
    overflows=st.lists(st.booleans(), max_size=40),
    window=st.integers(1, 4),
    hysteresis=st.integers(1, 3),
    consecutive=st.booleans(),
    power=st.integers(0, 3),
)
def test_the_dynamic_scale_follows_the_rule_step_by_step(
    overflows, window, hysteresis, consecutive, power
):
    rule = Rule(2.0**power, window, hysteresis, consecutive, 1)
    scaler = DynamicScale(
        2.0**power, window=window, hysteresis=hysteresis, consecutive=consecutive, min_scale=1
    )
    for overflow in overflows:
        rule.update(overflow)
        scaler.update(OVERFLOW if overflow else GOOD)
        assert (scaler.scale.item(), scaler.at_floor.item()) == (rule.scale, rule.at_floor)


def scales(scaler: DynamicScale, pattern: str) -> list[float]:
    """The scale after each step: x is an overflow."""
    seen = []
    for step in pattern:
        scaler.update(OVERFLOW if step == "x" else GOOD)
        seen.append(scaler.scale.item())
    return seen


def test_the_first_overflow_is_forgiven_the_second_is_not():
    assert scales(DynamicScale(16, hysteresis=2), "xxx") == [16, 8, 4]


def test_forgiveness_is_not_renewed_by_a_good_step_alone():
    assert scales(DynamicScale(16, hysteresis=2), "x.x") == [16, 16, 8]


def test_consecutive_hysteresis_renews_it_after_each_good_step():
    assert scales(DynamicScale(16, hysteresis=2, consecutive=True), "x.xx") == [16, 16, 16, 8]


def test_the_window_counts_from_the_last_overflow():
    """s = n - last - 1 is positive and a multiple of the window: three good steps for window 2."""
    assert scales(DynamicScale(1, window=2), "..x....") == [1, 1, 1, 1, 1, 2, 2]


def test_the_scale_stays_at_its_floor_and_says_so():
    scaler = DynamicScale(4, hysteresis=1, min_scale=2)
    assert scales(scaler, "x") == [2]
    assert not scaler.at_floor
    assert scales(scaler, "x") == [2]
    assert scaler.at_floor


def test_the_scale_never_grows_to_infinity():
    scaler = DynamicScale(2.0**126, window=1)
    assert scales(scaler, "...")[-1] == 2.0**127


@pytest.mark.parametrize("found", [torch.tensor(True), torch.tensor(3), torch.tensor(float("inf"))])
def test_anything_nonzero_counts_as_an_overflow(found):
    scaler = DynamicScale(4, hysteresis=1)
    scaler.update(found)
    assert scaler.scale.item() == 2


def test_the_tensor_of_the_scale_is_the_same_for_life():
    scaler = DynamicScale(16, hysteresis=1)
    held = scaler.scale
    scaler.update(OVERFLOW)
    scaler.load_state_dict(scaler.state_dict())
    assert held is scaler.scale
    assert (held.item(), held.dtype, held.shape) == (8, torch.float32, ())


def test_a_saved_scale_continues_as_if_never_interrupted():
    pattern = "x..x.x....xx...x"
    whole = DynamicScale(2.0**8, window=3)
    expected = scales(whole, pattern * 2)[len(pattern) :]
    first, second = DynamicScale(2.0**8, window=3), DynamicScale(2.0**4, window=3)
    scales(first, pattern)
    second.load_state_dict(first.state_dict())
    assert scales(second, pattern) == expected


class NoHostReads(TorchDispatchMode):
    """Fails when a value of a tensor reaches Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a tensor was read on the host"
        return func(*args, **(kwargs or {}))


def test_an_update_never_reads_a_value_on_the_host():
    scaler = DynamicScale(16)
    with NoHostReads():
        for found in (OVERFLOW, GOOD, OVERFLOW):
            scaler.update(found)


def test_updates_run_on_fake_tensors():
    with FakeTensorMode():
        scaler = DynamicScale(16)
        scaler.update(torch.ones(()))
        assert scaler.scale.shape == ()


def test_a_static_scale_does_not_move():
    scaler = LossScaler(128)
    scaler.update(OVERFLOW)
    assert (scaler.scale.item(), scaler.at_floor.item()) == (128, False)


def test_a_static_scale_is_the_configurations_even_after_loading():
    scaler = LossScaler(8)
    scaler.load_state_dict(LossScaler(128).state_dict())
    assert scaler.scale.item() == 8


def config(enabled=False, loss_scale=0.0, autocast=None):
    return SimpleNamespace(
        fp16=SimpleNamespace(
            enabled=enabled,
            loss_scale=loss_scale,
            initial_scale_power=5,
            loss_scale_window=2,
            hysteresis=1,
            consecutive_hysteresis=False,
            min_loss_scale=16,
        ),
        torch_autocast=SimpleNamespace(enabled=autocast is not None, dtype=autocast),
    )


@pytest.mark.parametrize(
    ("keys", "scale", "after_overflow"),
    [
        ({}, 1, 1),
        ({"enabled": True}, 32, 16),
        ({"enabled": True, "loss_scale": 64.0}, 64, 64),
        ({"autocast": "float16"}, 32, 16),
        ({"autocast": "bfloat16"}, 1, 1),
    ],
)
def test_the_configuration_chooses_the_scale(keys, scale, after_overflow):
    scaler = scaler_from(config(**keys), "cpu")
    assert scaler.scale.item() == scale
    scaler.update(OVERFLOW)
    assert scaler.scale.item() == after_overflow
