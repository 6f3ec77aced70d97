"""Every update runs with the learning rate of its schedule."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from loops import STAGES, adamw, assert_close, data, loss_of, open_engine, own_data, plain, train
from support.covering import some_stages
from torch.optim import lr_scheduler
from zeroshard_testing import on_ranks

from zeroshard.deepspeed.engine import GETTERS

SGD = {"type": "SGD", "params": {"lr": 0.5}}


def lrs_of(steps, **options):
    """The learning rate that each update ran with."""
    with open_engine(**options) as engine:
        found = []
        for micros in own_data(engine, steps):
            train(engine, [micros])
            found.append(engine.last_step.lr)
        return found


FIVE = {
    "WarmupLR": (
        {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4,
         "warmup_type": "linear"},
        [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5],
    ),
    "WarmupDecayLR": (
        {"total_num_steps": 6, "warmup_max_lr": 0.4, "warmup_num_steps": 2,
         "warmup_type": "linear"},
        [0.0, 0.0, 0.2, 0.4, 0.3, 0.2, 0.1, 0.0],
    ),
    "WarmupCosineLR": (
        {"total_num_steps": 4, "warmup_num_steps": 2, "warmup_min_ratio": 0.2,
         "cos_min_ratio": 0.0, "warmup_type": "linear"},
        [0.0, 0.1, 0.3, 0.25, 0.0, 0.0],
    ),
    "LRRangeTest": (
        {"lr_range_test_min_lr": 0.1, "lr_range_test_step_size": 2},
        [0.1, 0.15, 0.2, 0.25],
    ),
    "OneCycle": (
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2,
         "decay_step_size": 1, "decay_lr_rate": 1.0},
        [0.1, 0.2, 0.3, 0.2, 0.1, 0.05, 0.1 / 3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIVE)
def test_a_named_schedule_gives_every_update_its_value(name):
    """Update 0 runs with the value for i = -1, update k with that for i = k - 1."""
    params, expected = FIVE[name]
    found = lrs_of(
        len(expected), stage=2, optimizer=SGD, scheduler={"type": name, "params": params}
    )
    assert found == pytest.approx(expected, abs=1e-12)


def test_a_schedule_gives_each_group_its_own_value():
    def groups(params):
        matrices, rest = [], []
        for p in params:
            (matrices if p.ndim > 1 else rest).append(p)
        return torch.optim.SGD([{"params": matrices}, {"params": rest}], lr=1.0)

    params = {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [0.3, 0.6], "warmup_num_steps": 2,
              "warmup_type": "linear"}  # fmt: skip
    with open_engine(
        3, optimizer=groups, scheduler={"type": "WarmupLR", "params": params}
    ) as engine:
        found = []
        for micros in own_data(engine, 4):
            train(engine, [micros])
            found.append(engine.last_step.lrs)
    assert found == [pytest.approx(v) for v in [(0.1, 0.2), (0.1, 0.2), (0.2, 0.4), (0.3, 0.6)]]


def test_one_cycle_moves_the_momentum():
    params = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.3, "cycle_first_step_size": 2}
    keys = {"scheduler": {"type": "OneCycle", "params": params}}
    with open_engine(1, optimizer={"type": "AdamW"}, **keys) as engine:
        found = []
        for micros in own_data(engine, 4):
            found.append(GETTERS["get_mom"](engine)[0][0])
            train(engine, [micros])
    assert found == pytest.approx([0.8, 0.85, 0.8, 0.85])


TORCH = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (k + 1)),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
}


@pytest.mark.parametrize("name", TORCH)
@on_ranks(2)
def test_torch_schedules_act_as_in_plain_pytorch(name):
    """Also on the betas, which OneCycleLR moves."""

    def scheduled(params):
        optimizer = adamw(params)
        optimizer.schedule = TORCH[name](optimizer)
        step = optimizer.step

        def stepped(*args):
            step(*args)
            optimizer.schedule.step()

        optimizer.step = stepped
        return optimizer

    expected = plain(scheduled, steps=5, world=2)
    for stage in some_stages(STAGES):
        with open_engine(stage, lr_scheduler=TORCH[name]) as engine:
            train(engine, own_data(engine, 5))
            full = {name: value.clone() for name, value in engine.iter_full_params()}
            assert_close(full, expected)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_skipped_step_does_not_advance_the_schedule(stage):
    keys = {
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_num_steps": 4,
                       "warmup_type": "linear"},
        },
    }  # fmt: skip
    with open_engine(stage, optimizer=SGD, **keys) as engine:
        found = []
        for step, ((x, y),) in enumerate(own_data(engine, 6)):
            if step in (0, 3) and engine.global_rank == 1:
                x = x * 60000
            engine.backward(loss_of(engine, (x, y)))
            engine.step()
            found.append((engine.last_step.lr, engine.last_step.skipped))
            assert engine.was_step_applied() is not engine.last_step.skipped
    assert found == [
        (0.1, True), (0.1, False), (0.1, False), (0.2, True), (0.2, False),
        (pytest.approx(0.3), False),
    ]  # fmt: skip
    assert engine.skipped_steps == 2
    assert engine.global_steps == 6  # DeepSpeed counts skipped steps too


def test_accumulated_micro_batches_advance_it_once():
    with open_engine(
        2,
        lr_scheduler=partial(lr_scheduler.StepLR, step_size=1, gamma=0.5),
        gradient_accumulation_steps=3,
    ) as engine:
        train(engine, data(2, 3))
        assert engine.get_lr() == [0.0025]


def test_arguments_of_the_schedules_step_travel_through_the_engine():
    with open_engine(
        1, lr_scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    ) as engine:
        for metric, (batch,) in zip((1.0, 1.0, 1.0), data(3), strict=True):
            engine.backward(loss_of(engine, batch))
            engine.step(lr_kwargs={"metrics": metric})
        assert engine.get_lr() == [0.0025]
