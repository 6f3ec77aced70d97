"""Learning rate schedules: values computed by hand from the formulas, and rules that hold for all."""

from __future__ import annotations

import gc
import math
import warnings
import weakref
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.errors import ConfigError, UnsupportedError
from zeroshard.optim.schedulers import (
    VALID_LR_SCHEDULES,
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    build_scheduler,
    step_schedule,
)


def groups(*lrs: float, **options: object) -> SimpleNamespace:
    """The attributes of an optimizer that a schedule needs."""
    return SimpleNamespace(param_groups=[{"lr": lr, **options} for lr in lrs or (0.1,)])


def first_values(schedule, count: int) -> list[float]:
    """The learning rates of updates 0, 1, ... count - 1, as the engine steps the schedule."""
    seen = []
    for _ in range(count):
        seen.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.step()
    return seen


def test_linear_warmup_starts_with_two_updates_at_its_minimum():
    schedule = WarmupLR(groups(), 0.0, 1.0, warmup_num_steps=4, warmup_type="linear")
    assert first_values(schedule, 8) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_log_warmup_grows_with_the_logarithm():
    schedule = WarmupLR(groups(), 0.0, 1.0, warmup_num_steps=8)
    expected = [0, 0, 1 / 3, math.log2(3) / 3, 2 / 3, math.log2(5) / 3]
    assert first_values(schedule, 6) == pytest.approx(expected, rel=1e-12)


def test_warmup_runs_between_its_two_rates():
    schedule = WarmupLR(groups(), 0.1, 0.5, warmup_num_steps=4, warmup_type="linear")
    assert first_values(schedule, 6) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_warmup_ends_at_each_groups_own_rate_by_default():
    schedule = WarmupLR(groups(0.5, 0.25), warmup_num_steps=2)
    assert schedule.lr_at(10) == [0.5, 0.25]


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_warmup_is_never_shorter_than_two_steps(num_steps):
    schedule = WarmupLR(groups(), 0.0, 1.0, warmup_num_steps=num_steps, warmup_type="linear")
    assert first_values(schedule, 4) == [0.0, 0.0, 0.5, 1.0]


def test_an_unknown_warmup_type_warns_and_means_log(caplog):
    schedule = WarmupLR(groups(), 0.0, 1.0, 8, "cubic")
    assert "cubic" in caplog.text
    assert schedule.lr_at(3) == WarmupLR(groups(), 0.0, 1.0, 8, "log").lr_at(3)


def test_decay_goes_straight_to_the_minimum_at_the_last_step():
    schedule = WarmupDecayLR(
        groups(), 6, warmup_max_lr=1.0, warmup_num_steps=2, warmup_type="linear"
    )
    assert first_values(schedule, 10) == [0, 0, 0.5, 1.0, 0.75, 0.5, 0.25, 0, 0, 0]


def test_decay_to_a_minimum_above_zero():
    schedule = WarmupDecayLR(groups(), 4, 0.2, 1.0, 2, "linear")
    assert schedule.lr_at(3) == [pytest.approx(0.6)]
    assert schedule.lr_at(4) == [pytest.approx(0.2)]


def test_decay_rises_to_a_thousandth_by_default():
    assert WarmupDecayLR(groups(0.5), 10, warmup_num_steps=2).lr_at(2) == [1e-3]


def test_a_warmup_longer_than_the_run_is_said(caplog):
    WarmupDecayLR(groups(), 10, warmup_num_steps=20)
    assert "total_num_steps 10 is less than warmup_num_steps 20" in caplog.text


def test_cosine_starts_at_zero_then_at_its_minimum_and_ends_at_its_floor():
    schedule = WarmupCosineLR(
        groups(2.0), 6, 0.5, warmup_num_steps=2, cos_min_ratio=0.1, warmup_type="linear"
    )
    half = math.sqrt(0.5)
    ratios = [0, 0.5, 0.75, *(0.1 + 0.9 * (1 + c) / 2 for c in (half, 0, -half, -1, -1))]
    assert first_values(schedule, 8) == pytest.approx([2 * r for r in ratios], rel=1e-12)


def test_cosine_scales_each_groups_own_rate():
    schedule = WarmupCosineLR(groups(1.0, 4.0), 10, warmup_num_steps=2)
    schedule.step(5)
    low, high = schedule.get_last_lr()
    assert high == pytest.approx(4 * low)


def test_the_range_test_grows_without_end():
    schedule = LRRangeTest(groups(), 0.1, lr_range_test_step_size=2, lr_range_test_step_rate=3.0)
    assert first_values(schedule, 5) == pytest.approx([0.1, 0.25, 0.4, 0.55, 0.7])


def test_the_range_test_climbs_stairs():
    schedule = LRRangeTest(groups(), 0.1, lr_range_test_step_size=2, lr_range_test_staircase=True)
    assert first_values(schedule, 5) == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3])


def one_cycle(optimizer=None, **options):
    defaults = {"cycle_min_lr": 1.0, "cycle_max_lr": 5.0, "cycle_first_step_size": 4}
    return OneCycle(optimizer or groups(betas=(0.9, 0.999)), **{**defaults, **options})


def test_one_cycle_goes_up_and_down():
    schedule = one_cycle(cycle_second_step_size=2)
    assert first_values(schedule, 9) == pytest.approx([1, 2, 3, 4, 5, 3, 1, 1, 1])


def test_one_cycle_decays_after_its_cycle():
    schedule = one_cycle(cycle_second_step_size=4, decay_step_size=2, decay_lr_rate=1.0)
    assert schedule.lr_at(7) == [1.0]
    assert [schedule.lr_at(i)[0] for i in (8, 9, 11)] == pytest.approx([1 / 1.5, 1 / 2, 1 / 3])


def test_one_cycle_without_a_second_half_falls_at_once():
    assert first_values(one_cycle(cycle_second_step_size=0), 6) == [1, 2, 3, 4, 1, 1]


def test_one_cycle_moves_momentum_against_the_rate():
    schedule = one_cycle(
        cycle_min_mom=0.5, cycle_max_mom=0.9, decay_step_size=1, decay_mom_rate=0.1
    )
    momenta = [schedule.momentum_at(i) for i in (-1, 0, 1, 3, 5, 7, 8, 9)]
    assert momenta == pytest.approx([0.5, 0.8, 0.7, 0.5, 0.7, 0.9, 0.99, 1.08])


def test_one_cycle_writes_betas():
    schedule = one_cycle(cycle_min_mom=0.5, cycle_max_mom=0.9)
    group = schedule.optimizer.param_groups[0]
    assert group["betas"] == (0.5, 0.99)
    schedule.step()
    assert group["betas"] == (pytest.approx(0.8), 0.99)


def test_one_cycle_without_betas_moves_the_rate_only(caplog):
    schedule = one_cycle(groups())
    schedule.step()
    assert "no betas" in caplog.text
    assert schedule.optimizer.param_groups[0] == {"lr": 2.0}


def test_one_cycle_may_leave_momentum_alone():
    optimizer = groups(betas=(0.7, 0.999))
    one_cycle(optimizer, cycle_momentum=False)
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.999)


def test_one_cycle_climbs_stairs():
    """Two stairs up over 4 steps, four down over 4: offsets 0..7."""
    schedule = one_cycle(cycle_first_stair_count=2, cycle_second_stair_count=4)
    assert first_values(schedule, 8) == pytest.approx([1, 1, 3, 3, 5, 4, 3, 2])


def test_one_cycle_uses_the_same_stairs_down_unless_told():
    schedule = one_cycle(cycle_first_stair_count=2)
    assert first_values(schedule, 8) == pytest.approx([1, 1, 3, 3, 5, 3, 3, 1])


# what holds for all five

PARAMS = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5},
    "WarmupLR": {"warmup_num_steps": 5},
    "WarmupDecayLR": {"total_num_steps": 20, "warmup_num_steps": 5},
    "WarmupCosineLR": {"total_num_steps": 20, "warmup_num_steps": 5},
}
all_five = pytest.mark.parametrize("type_", VALID_LR_SCHEDULES)


@all_five
def test_the_constructor_writes_the_first_value(type_):
    optimizer = groups(0.1, betas=(0.9, 0.999))
    schedule = build_scheduler(type_, PARAMS[type_], optimizer)
    assert [optimizer.param_groups[0]["lr"]] == schedule.lr_at(-1) == schedule.get_last_lr()


@all_five
def test_the_state_is_the_index_of_the_last_update(type_):
    schedule = build_scheduler(type_, PARAMS[type_], groups())
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 0}


@all_five
def test_a_loaded_schedule_continues_with_the_same_values(type_):
    first = build_scheduler(type_, PARAMS[type_], groups(betas=(0.9, 0.999)))
    second = build_scheduler(type_, PARAMS[type_], groups(betas=(0.9, 0.999)))
    first_values(first, 7)
    second.load_state_dict(first.state_dict())
    assert first_values(second, 20) == first_values(first, 20)


@all_five
def test_a_continued_schedule_has_no_value_before_its_first_step(type_):
    optimizer = groups(0.1)
    schedule = build_scheduler(type_, {**PARAMS[type_], "last_batch_iteration": 3}, optimizer)
    with pytest.raises(AssertionError, match="need to call step"):
        schedule.get_last_lr()
    assert optimizer.param_groups[0]["lr"] == 0.1
    schedule.step()
    assert schedule.get_last_lr() == schedule.lr_at(4)


@all_five
def test_a_step_may_jump(type_):
    schedule = build_scheduler(type_, PARAMS[type_], groups())
    schedule.step(11)
    assert schedule.get_last_lr() == schedule.lr_at(11) == schedule.get_lr()


@all_five
@given(i=st.integers(-1, 200))
def test_rates_are_finite_and_never_negative(type_, i):
    schedule = build_scheduler(type_, PARAMS[type_], groups())
    assert all(math.isfinite(lr) and lr >= 0 for lr in schedule.lr_at(i))


@given(i=st.integers(0, 60))
def test_a_warmup_never_falls_and_a_decay_never_rises(i):
    schedule = WarmupDecayLR(groups(), 50, 0.0, 1.0, 10)
    (now,), (later,) = schedule.lr_at(i), schedule.lr_at(i + 1)
    assert later >= now if i < 10 else later <= now


@pytest.mark.parametrize(
    ("type_", "key"),
    [("WarmupLR", "warmup_min_lr"), ("LRRangeTest", "lr_range_test_min_lr")],
)
def test_a_list_gives_one_value_per_group(type_, key):
    schedule = build_scheduler(type_, {key: [0.25, 0.5]}, groups(1.0, 1.0))
    assert schedule.get_last_lr() == [0.25, 0.5]


def test_a_list_of_another_length_is_an_error():
    with pytest.raises(ConfigError, match="warmup_min_lr has 3 values, the optimizer has 1"):
        build_scheduler("WarmupLR", {"warmup_min_lr": [1, 2, 3]}, groups())


def test_a_rate_that_is_a_tensor_stays_the_same_tensor():
    rate = torch.tensor(0.0)
    schedule = WarmupLR(groups(rate), 0.0, 1.0, 2, "linear")
    schedule.step(1)
    assert schedule.optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


# by name


def test_a_schedule_of_torch_is_built_by_name():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = build_scheduler("StepLR", {"step_size": 1, "gamma": 0.5}, optimizer)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("type_", "params", "words"),
    [
        ("WarmupLr", {}, 'scheduler.type "WarmupLr" does not exist; did you mean "WarmupLR"?'),
        ("LRScheduler", {}, "does not exist"),
        ("WarmupDecayLR", {}, "total_num_steps"),
        ("WarmupLR", {"warmup_steps": 3}, "warmup_steps"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "lr_range_test_step_size is 0"),
        ("OneCycle", {**PARAMS["OneCycle"], "cycle_first_step_size": 0}, "first_step_size is 0"),
        ("OneCycle", {**PARAMS["OneCycle"], "cycle_second_step_size": -1}, "step_size is -1"),
    ],
)
def test_a_wrong_name_or_argument_says_what_would_be_right(type_, params, words):
    with pytest.raises(ConfigError) as caught:
        build_scheduler(type_, params, groups())
    assert words in str(caught.value)


def test_a_schedule_that_follows_a_metric_is_refused_with_the_way_out():
    with pytest.raises(UnsupportedError, match=r"step\(metric\)"):
        build_scheduler("ReduceLROnPlateau", {}, groups())


READ_BY_PROGRAMS = {
    "WarmupLR": ({"warmup_max_lr": 1.0, "warmup_num_steps": 1}, {
        "min_lrs": [0.0], "max_lrs": [1.0], "warmup_num_steps": 2, "warmup_type": "log",
    }),
    "WarmupDecayLR": ({"total_num_steps": 9, "warmup_type": "linear"}, {
        "min_lrs": [0.0], "max_lrs": [1e-3], "total_num_steps": 9, "warmup_type": "linear",
    }),
    "WarmupCosineLR": ({"total_num_steps": 9, "cos_min_ratio": 0.5}, {
        "org_lrs": [0.1], "total_num_steps": 9, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.5,
        "warmup_num_steps": 1000, "warmup_type": "log",
    }),
    "LRRangeTest": ({"lr_range_test_min_lr": 0.25, "lr_range_test_staircase": True}, {
        "min_lr": [0.25], "step_size": 2000, "step_rate": 1.0, "staircase": True,
    }),
    "OneCycle": (
        {"cycle_min_lr": 0.5, "cycle_max_lr": 1.0, "cycle_first_step_size": 30,
         "cycle_second_step_size": 10, "decay_lr_rate": 0.1, "decay_step_size": 5},
        {"min_lrs": [0.5], "max_lrs": [1.0], "first_step_size": 30, "second_step_size": 10,
         "total_size": 40, "step_ratio": 0.75, "decay_lr_rate": 0.1, "decay_step_size": 5},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VALID_LR_SCHEDULES)
def test_programs_read_what_a_schedule_was_made_of(name):
    params, attributes = READ_BY_PROGRAMS[name]
    schedule = build_scheduler(name, params, groups(betas=(0.9, 0.999)))
    assert {key: getattr(schedule, key) for key in attributes} == attributes


@pytest.mark.parametrize(
    ("step", "arguments", "gets"),
    [
        (lambda: (), {}, ()),
        (lambda epoch=None: (epoch,), {}, (None,)),
        (lambda increment, tokens=None: (increment, tokens), {}, (8, None)),
        (lambda increment, tokens=None: (increment, tokens), {"increment": 3}, (3, None)),
        (lambda *args, **kwargs: (args, kwargs), {}, ((), {})),
        (max, {}, "max expected at least 1 argument"),
    ],
)
def test_a_step_that_cannot_run_without_an_argument_gets_the_samples(step, arguments, gets):
    seen: list[object] = []
    function = SimpleNamespace(step=step if step is max else noted(step, seen))
    if isinstance(gets, str):
        with pytest.raises(TypeError, match=gets):
            step_schedule(function, arguments, lambda: 8)
        return
    step_schedule(function, arguments, lambda: 8)
    assert seen == [gets]


def test_torchs_schedule_of_the_engines_optimizer_object_does_not_warn():
    """The engine updates without calling ``step`` of the object that the program has."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_schedule(schedule, {}, lambda: 8)
    assert optimizer.param_groups[0]["lr"] == 0.5


def noted(step: Callable[..., object], seen: list[object]) -> Callable[..., object]:
    """``step``, with its signature."""

    @wraps(step)
    def run(*args: object, **kwargs: object) -> None:
        seen.append(step(*args, **kwargs))

    return run


def used_schedules() -> list[weakref.ref[object]]:
    """A method that was a schedule's step, and a schedule whose step is a function of its own."""

    class Counted:
        samples = 0

        def step(self, increment):
            self.samples += increment

    schedule, own = Counted(), Counted()
    own.step = lambda increment: Counted.step(own, increment)
    for each in (schedule, own):
        step_schedule(each, {}, lambda: 8)
        assert each.samples == 8
    return [weakref.ref(Counted.step), weakref.ref(own)]


def test_schedules_of_the_program_are_not_kept_alive():
    left = used_schedules()
    gc.collect()
    assert [found() for found in left] == [None, None]
