"""The time of a pipeline step: what ranks wait for each other, in exact seconds."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.pipeline_models import bubble
from torch import nn

from zeroshard.config.machine_file import MachineFile
from zeroshard.core.mesh import Mesh
from zeroshard.parallel import pipeline
from zeroshard.parallel.schedules import SCHEDULES
from zeroshard.planner.schedule import (
    MESSAGES,
    Arrival,
    Compute,
    Send,
    Start,
    StreamWait,
    Timing,
    timing,
)
from zeroshard.planner.simulate import simulate
from zeroshard.planner.step_time import stage_times

RANKS, COUNT = 4, 8


def played(name, per_rank=1, *, ranks=RANKS, count=COUNT, message_s=0.0, serial=False):
    """The steps of ranks whose forwards take 1 s and backwards 2 s, with a message after each."""
    last = ranks * per_rank - 1
    made = []
    for actions in SCHEDULES[name].actions(ranks, per_rank, count):
        events = []
        for kind, stage, number in actions:
            before, end = (stage - 1, last) if kind == "F" else (stage + 1, 0)
            if 0 <= before <= last:
                events.append(Arrival(f"{kind}{before} {number}", message_s))
            events.append(Compute(1.0 if kind == "F" else 2.0))
            if stage != end:
                events.append(Send(f"{kind}{stage} {number}", message_s))
        made.append(events)
    return [found for found, _ in timing(made, serial=serial)]


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize(
    ("name", "per_rank"), [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2)]
)
def test_what_equal_stages_wait_is_the_bubble(name, per_rank, serial):
    every = played(name, per_rank, serial=serial)
    slots = per_rank * COUNT + RANKS - 1
    assert [found.total_s for found in every] == pytest.approx([3 * slots] * RANKS)
    for found in every:
        assert found.stages_s / found.total_s == pytest.approx(bubble(RANKS, per_rank, COUNT))


def test_messages_of_two_stages_are_waited_for_as_by_hand():
    first, second = played("1F1B", ranks=2, count=2, message_s=0.25)
    # the second stage computes 1.25 to 7.25, the first one 0 to 2, 4.5 to 6.5 and 7.5 to 9.5
    assert first == Timing(9.5, 6.0, {MESSAGES: 1.0}, {MESSAGES: 0.5}, 0.0, 3.0)
    assert second == Timing(9.5, 6.0, {MESSAGES: 1.0}, {MESSAGES: 0.25}, 0.0, 3.25)
    one_processor, _ = played("1F1B", ranks=2, count=2, message_s=0.25, serial=True)
    # both ends of each of the four messages work 0.25 s
    assert one_processor == Timing(10.5, 6.0, {MESSAGES: 1.0}, {MESSAGES: 1.0}, 0.0, 3.5)


def test_a_collective_over_stages_begins_when_the_last_one_has_come():
    joint = [Start("norm", "all-gather", 1.0, members=2), StreamWait("norm"), Compute(2.0)]
    (early, _), (late, _) = timing([[Compute(1.0), *joint], [Compute(4.0), *joint]], serial=False)
    assert (early.total_s, early.stages_s, early.exposed_s) == (7.0, 3.0, {"all-gather": 1.0})
    assert (late.total_s, late.stages_s, late.exposed_s) == (7.0, 0.0, {"all-gather": 1.0})


def test_stages_that_block_each_other_are_an_error():
    with pytest.raises(ValueError, match="without end"):
        timing([[Arrival("a"), Send("b", 1)], [Arrival("b"), Send("a", 1)]], serial=False)


# ---------------------------------------------------------------------- the engine's own schedule

WIDTH = 64
RATE = 1e6


def machine(execution="streams", *, message=1e30):
    """Only products of matrices take time, and messages if that is asked for."""

    def measured(value):
        if isinstance(value, dict):
            return {key: measured(each) for key, each in value.items()}
        return {"value": value, "source": "measured"}

    fast, rate = [[1, 1e30]], [[1, message]]
    numbers = {
        "devices_per_node": 4,
        "device": {"bytes_per_s": fast, "operation_s": 1e-30, "optimizer_bytes_per_s": 1e30},
        "matmul": {"float32": [[1, RATE]]},
        "special": {"exp": 1e30},
        "inside_node": {
            "alpha_s": 1e-30, "all_gather": rate, "reduce_scatter": fast, "all_reduce": fast
        },
    }  # fmt: skip
    return MachineFile.model_validate(
        {"name": "made up", "execution": execution} | {k: measured(v) for k, v in numbers.items()}
    )


class First(nn.Module):
    """Takes no time, and lets the first stage compute the gradient of its input like the others."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * self.scale


def cut(schedule, per_rank):
    stages = RANKS * per_rank
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(stages)]
    return pipeline(
        nn.Sequential(First(), *layers), split=[str(at) for at in range(2, stages + 1)],
        loss_fn=nn.functional.mse_loss, schedule=schedule,
    )  # fmt: skip


@cache
def simulated(schedule, per_rank):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    batch = torch.empty(2, WIDTH), torch.empty(2, WIDTH)
    return [
        simulate(
            lambda: cut(schedule, per_rank), config, batch, mesh=Mesh(pipeline=RANKS), rank=rank,
            with_events=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip


@pytest.mark.parametrize("execution", ["streams", "serial"])
@pytest.mark.parametrize(("schedule", "per_rank"), [("1F1B", 1), ("Interleaved1F1B", 2)])
def test_a_step_of_equal_stages_takes_as_many_slots_as_by_hand(schedule, per_rank, execution):
    found = simulated(schedule, per_rank)
    slot_s = 3 * 2 * 2 * WIDTH * WIDTH / RATE  # a forward, and two products in backward
    every = stage_times(found, machine(execution), samples=16, tokens=0)
    slots = per_rank * COUNT + RANKS - 1
    assert [time.total_s for time in every] == pytest.approx([slots * slot_s] * RANKS)
    for time in every:
        assert time.timing.stages_s == pytest.approx((RANKS - 1) * slot_s)
        assert time.stages == RANKS and time.band == 0.2
    slow = machine(execution, message=2 * 2 * WIDTH * 4 / slot_s)
    later = stage_times(found, slow, samples=16, tokens=0)
    assert later[0].total_s > every[0].total_s + (RANKS - 1) * slot_s
