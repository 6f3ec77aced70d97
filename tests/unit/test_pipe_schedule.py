"""DeepSpeed's schedules give the values of DeepSpeed, and instructions look as its own do."""

from __future__ import annotations

import hashlib
import runpy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from zeroshard import deepspeed
from zeroshard.deepspeed import pipe_schedule, pipeline_engine
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.errors import UnsupportedError, UsageError

SHAPES = [(stages, count) for stages in range(1, 9) for count in range(1, 13)]

DIGEST = "516bf3676e80f1d50a6601876271e8e952b5eaa5d4134813ba950269678bad81"
"""Of :func:`lines` of DeepSpeed 0.19.8 (``schedule``: its ``deepspeed.runtime.pipe.schedule``)."""


def lines(schedule: Any) -> Iterator[str]:
    """All values of all schedules, for up to 8 stages and 12 micro-batches, as text."""
    for kind in ("TrainSchedule", "InferenceSchedule", "DataParallelSchedule"):
        for stages, count in SHAPES:
            for stage in range(stages):
                s = getattr(schedule, kind)(micro_batches=count, stages=stages, stage_id=stage)
                yield (
                    f"{kind} {stages} {count} {stage} {s.num_pipe_buffers()} {s.stage} {s.num_stages} "
                    f"{s.num_micro_batches} {s.is_first_stage} {s.is_last_stage} {list(s)} "
                    f"{[s._buffer_idx(m) for m in range(count)]}"
                )


def test_all_values_are_those_of_deepspeed():
    found = "\n".join(lines(pipe_schedule))
    assert hashlib.sha256(found.encode()).hexdigest() == DIGEST


def placed(kind: str, stages: int, count: int) -> dict[str, list[tuple[int, int, int]]]:
    """Where each instruction is: step, stage and place in its list, by name."""
    found = defaultdict(list)
    for stage in range(stages):
        made = getattr(pipe_schedule, kind)(count, stages, stage)
        for step, cmds in enumerate(made):
            for place, each in enumerate(cmds):
                found[each.name].append((step, stage, place))
    return found


@pytest.mark.parametrize(("stages", "count"), [(1, 1), (2, 3), (3, 1), (4, 8), (7, 5), (8, 12)])
def test_forwards_and_backwards_are_at_the_steps_of_the_rule(stages, count):
    """Forward ``m`` of stage ``s`` is at step ``2 m + s``, its backward at ``2 (m + S) - 1 - s``."""
    found = placed("TrainSchedule", stages, count)
    grid = [(m, s) for m in range(count) for s in range(stages)]
    steps = {name: sorted((t, s) for t, s, _ in at) for name, at in found.items()}
    assert steps["ForwardPass"] == sorted((2 * m + s, s) for m, s in grid)
    assert steps["BackwardPass"] == sorted((2 * (m + stages) - 1 - s, s) for m, s in grid)
    ends = {0, stages - 1}
    assert steps["LoadMicroBatch"] == sorted((2 * m + s, s) for m, s in grid if s in ends)
    # A message leaves and arrives at the same step: that of the receiver's work on it.
    inner = [(m, s) for m, s in grid if s > 0]
    assert steps.get("RecvActivation", []) == sorted((2 * m + s, s) for m, s in inner)
    assert steps.get("SendActivation", []) == sorted((2 * m + s, s - 1) for m, s in inner)
    back = sorted((2 * (m + stages) - s, s - 1) for m, s in inner)
    assert steps.get("RecvGrad", []) == back
    assert steps.get("SendGrad", []) == sorted((t, s + 1) for t, s in back)
    last = 2 * (count + stages - 1) - 1
    for name in ("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"):
        assert steps[name] == [(last, s) for s in range(stages)]


@pytest.mark.parametrize(("stages", "count"), [(1, 2), (2, 3), (5, 4), (8, 12)])
def test_inference_runs_each_micro_batch_one_step_after_the_stage_before(stages, count):
    found = placed("InferenceSchedule", stages, count)
    grid = [(m, s) for m in range(count) for s in range(stages)]
    assert sorted((t, s) for t, s, _ in found["ForwardPass"]) == sorted((m + s, s) for m, s in grid)
    received = sorted((t, s) for t, s, _ in found["RecvActivation"])
    sent = sorted((t, s + 1) for t, s, _ in found["SendActivation"])
    assert received == sent == sorted((m + s, s) for m, s in grid if s)


def test_instructions_have_their_arguments_as_attributes():
    made = pipe_schedule.ForwardPass(3, phase=1)
    assert (made.buffer_id, made.phase, made.kwargs) == (3, 1, {"buffer_id": 3, "phase": 1})
    assert repr(made) == "ForwardPass(buffer_id=3, phase=1)"
    assert repr(pipe_schedule.OptimizerStep()) == "OptimizerStep()"


def test_a_schedule_starts_anew_with_each_loop():
    made = pipe_schedule.DataParallelSchedule(2, 1, 0)
    assert [len(step) for step in made] == [len(step) for step in made] == [3, 5]


def test_what_is_not_offered_says_so():
    with pytest.raises(UsageError, match="micro-batch 2 of 2 has no buffer"):
        pipe_schedule.TrainSchedule(2, 1, 0)._buffer_idx(2)
    schedule = deepspeed.runtime.pipe.schedule
    assert schedule.TrainSchedule is pipe_schedule.TrainSchedule
    with pytest.raises(UnsupportedError, match="its schedule is not offered"):
        schedule.DualPipeVSchedule(8, 2, 0)


def test_a_schedule_that_is_patched_before_the_engine_is_imported_is_seen():
    engine = PipelineEngine.__new__(PipelineEngine)
    with mock.patch.object(pipe_schedule.TrainSchedule, "steps", lambda _self: iter(())):
        imported_later = runpy.run_path(pipeline_engine.__file__)
        assert imported_later["changed"](engine) == "TrainSchedule.steps"
    assert imported_later["changed"](engine) == ""
