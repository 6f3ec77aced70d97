"""What a rank learns from the process that simulates changes for it: changes that fit, or a reason."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from support.remedies import Chain
from torch import Tensor, nn

from zeroshard.core.mesh import Mesh
from zeroshard.engine.run_description import RunDescription
from zeroshard.engine.simulated_changes import PROCESS, Question, StatesQuestion
from zeroshard.errors import UsageError
from zeroshard.launch.alone import run_alone
from zeroshard.parallel import pickled_model, pipeline
from zeroshard.parallel.pickled_model import NotDescribable, pickled
from zeroshard.planner.changes import changed_keys
from zeroshard.planner.failed_run import ACCUMULATION, answer, least_of_each, planned
from zeroshard.planner.own_batch import MICRO_BATCH
from zeroshard.zero.input_shapes import Shape, Unknown, shapes_of

WIDTH, DEPTH, ROWS = 32, 8, 512

RECOMPUTE = "model.gradient_checkpointing_enable()"

CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "unit_min_numel": 1,
    "transport": "p2p",
    "gradient_clipping": 0.0,
}


def described(
    model: nn.Module, *args: Any, optimizer: Any = None, config: Any = CONFIG, **changed: Any
) -> RunDescription:
    """A run of two ranks at stage 1, seen from rank 0."""
    made = {
        "model": pickled(model),
        "optimizer": None if optimizer is None else pickled(optimizer),
        "batch": (shapes_of(args), None),
        "config": {**config, "zero_optimization": {"stage": 1}},
        "micro_batch": ROWS,
        "accumulation": 1,
        "enough": 2,
        "mesh": Mesh(data_shard=2),
        "plan": None,
        "rank": 0,
        "ranks_per_node": 2,
        "on_gpu": False,
        "dtype": torch.float32,
        "path": tuple(sys.path),
    }
    return RunDescription(**{**made, **changed})


def chain(width: int = WIDTH, rows: int = ROWS, **changed: Any) -> RunDescription:
    return described(Chain(width, DEPTH), torch.ones(rows, width), micro_batch=rows, **changed)


def peak_of(run: RunDescription, line: str = "") -> int:
    return planned(run, changed_keys(line), line).peak_nbytes


@pytest.mark.full
@pytest.mark.parametrize(("part", "rows", "others"), [(0.75, 256, [RECOMPUTE]), (0.5, 128, [])])
def test_the_largest_batch_is_found_and_checkpointing_if_it_is_enough(part, rows, others):
    run = chain()
    peak = peak_of(run)
    room = int(part * peak)
    found = answer(Question(run, room, 1000, 600.0))["found"]
    smaller = {MICRO_BATCH: rows, ACCUMULATION: ROWS // rows}
    twice = {MICRO_BATCH: 2 * rows, ACCUMULATION: ROWS // rows // 2}
    assert [each["line"] for each in found] == [json.dumps(smaller), *others]
    for each in found:
        assert each["freed_nbytes"] == peak - peak_of(run, each["line"]) > peak - room
    assert peak_of(run, json.dumps(twice) if rows < ROWS // 2 else "") > room


def test_before_there_is_an_engine_each_change_is_built_without_memory():
    """Stage 2 halves gradients and moments; stage 9 is none, and stage 0 is what stage 1 shards."""
    run, numel = chain(), sum(param.numel() for param in Chain(WIDTH, DEPTH).parameters())
    lines = [json.dumps({"zero_optimization": {"stage": stage}}) for stage in (0, 2, 9)]
    (base, zero, two, none) = least_of_each(StatesQuestion(run, tuple(lines), 600.0))["found"]
    assert none is None
    assert zero - base == pytest.approx(2 * 4 * numel / 2, rel=0.02)
    passing = 4 * numel / DEPTH  # the whole gradient of a unit
    assert base - two == pytest.approx(4 * numel / 2 - passing, rel=0.02)
    late = least_of_each(StatesQuestion(run, tuple(lines), 0.0))
    assert late == {"reason": "the simulations did not end in 0 s"}


@pytest.mark.full
@pytest.mark.parametrize("on_gpu", [False, True])
def test_host_memory_is_offered_to_gpus_only(on_gpu):
    run = chain(96, 8, on_gpu=on_gpu)
    found = answer(Question(run, int(0.9 * peak_of(run)), 1000, 600.0))["found"]
    assert any("offload_optimizer" in each["line"] for each in found) is on_gpu


def test_what_a_simulation_does_not_explain_gets_no_advice():
    run = chain()
    reason = answer(Question(run, 2 * peak_of(run), 1000, 600.0))["reason"]
    assert reason.startswith("a simulation of the run needs ")


def test_no_simulation_begins_after_the_time():
    run = chain()
    reason = answer(Question(run, int(0.7 * peak_of(run)), 1000, 0.0))["reason"]
    assert reason == "in 0 s no single change was found to be enough by simulation"


def defaults_of(kind: Any) -> dict[str, Any]:
    """Those of an optimizer object. That of AdamW has more of them than AdamW takes."""
    return kind(nn.Linear(1, 1).parameters(), lr=0.1).defaults


def test_the_optimizer_of_the_program_counts():
    """SGD has no state; the update of AdamW holds two more numbers per parameter, a half on a rank."""
    config = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    numel = sum(param.numel() for param in Chain(WIDTH, DEPTH).parameters())
    states = [
        planned(chain(config=config, optimizer=(kind, defaults_of(kind))), {}, "").states_nbytes()
        for kind in (torch.optim.SGD, torch.optim.AdamW)
    ]
    assert states[1] - states[0] == pytest.approx(2 * 4 * numel / 2, rel=0.02)


class Named(nn.Module):
    """Takes its second input by name, and returns what is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float) -> dict[str, Tensor]:
        assert len(x) == len(mask)
        return {"logits": self.linear(x) * mask * scale}


def test_inputs_by_place_and_by_name_are_divided_together():
    given = {"x": torch.ones(ROWS, WIDTH), "mask": torch.ones(ROWS, 1), "scale": 2.0}
    run = described(Named(), batch=(shapes_of(given), None))
    line = json.dumps({MICRO_BATCH: ROWS // 4, ACCUMULATION: 4})
    assert peak_of(run, line) < peak_of(run)


def test_rows_that_cannot_be_divided_are_refused():
    run = chain()
    odd = RunDescription(**{**vars(run), "batch": ((shapes_of(torch.ones(9, WIDTH)),), None)})
    with pytest.raises(UsageError, match="9 rows cannot be divided"):
        planned(odd, {MICRO_BATCH: ROWS // 2, ACCUMULATION: 2}, "{")


def test_the_process_is_no_rank_and_gets_classes_that_cannot_be_imported(monkeypatch):
    class NeedsValues(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.linear.bias.sum().item()

    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "3")
    question = Question(described(NeedsValues(), torch.ones(ROWS, WIDTH)), 1, 1, 100.0)
    found = json.loads(run_alone(PROCESS, pickle.dumps(question), limit_s=200.0))
    assert "_local_scalar_dense" in found["reason"]


def test_a_process_that_takes_too_long_is_ended():
    question = Question(chain(), 1, 1, 100.0)
    with pytest.raises(subprocess.TimeoutExpired):
        run_alone(PROCESS, pickle.dumps(question), limit_s=0.1)


def test_a_model_that_cannot_be_pickled_is_named():
    model = Chain(WIDTH, 1)
    model.lock = threading.Lock()
    with pytest.raises(
        NotDescribable, match=r"cannot be pickled \(TypeError: cannot pickle '_thread.lock'"
    ):
        described(model, torch.ones(1))


def test_a_model_that_holds_data_is_not_copied(monkeypatch):
    """Tensors have no values in the copy, whatever their size."""
    model = Chain(WIDTH, 1)
    model.register_buffer("table", torch.empty(1 << 20))
    monkeypatch.setattr(pickled_model, "MOST_NBYTES", 1 << 20)
    assert len(pickled(model)) < 1 << 16
    model.data = bytes(1 << 20)
    with pytest.raises(NotDescribable, match="it holds more than 1 MiB besides tensors"):
        pickled(model)


def test_a_pipeline_that_was_cut_before_says_so():
    made = pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), split=["1"])
    made.keep(0, 2)
    with pytest.raises(NotDescribable, match="was cut before this engine"):
        made.as_built()


def test_only_shapes_of_inputs_are_remembered():
    batch = {"ids": torch.ones(2, 3), "more": (None, [torch.ones(1).half()]), "cache": Chain(4, 1)}
    found = shapes_of(batch)
    assert found == {
        "ids": Shape((2, 3), torch.float32, False),
        "more": (None, [Shape((1,), torch.float16, False)]),
        "cache": Unknown("Chain"),
    }
