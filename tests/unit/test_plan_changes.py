"""The changes that a plan prints if the run does not fit: each was simulated, and applied it fits."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from support.covering import sampled
from support.remedies import Block, Recomputing, applied
from torch import Tensor, nn
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.planner.changes import changes_that_fit, with_changes
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.planner.plan import Plan

RANKS, LENGTH = 4, 32


class Words(Recomputing):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.through(self.table(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def wide() -> nn.Module:
    return Words(64)


def narrow() -> nn.Module:
    return Words(16)


def config(stage: int, micro_batch: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch, "unit_min_numel": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage}, **keys,
    }  # fmt: skip


BF16 = {"bf16": {"enabled": True}}
SCENARIOS: dict[str, tuple[str, dict[str, Any], Any, float]] = {
    "states at stage 0": ("wide", config(0, 1), "cpu", 0.9),
    "both at stage 1": ("wide", config(1, 8, **BF16), "cuda", 0.9),
    "activations at stage 0": ("narrow", config(0, 12), "cpu", 0.93),
    "activations at stage 2": ("narrow", config(2, 12, gradient_accumulation_steps=3), "cpu", 0.98),
    "both at stage 3": ("wide", config(3, 8, **BF16), "cuda", 0.9),
}
"""The model, the configuration, the device, and the part of the peak for which there is memory."""


@pytest.mark.parametrize("scenario", sampled([*SCENARIOS], every=3))
def test_with_each_of_three_printed_changes_the_plan_fits(scenario):
    model, settings, target, part = SCENARIOS[scenario]
    common: dict[str, Any] = {"length": LENGTH, "target": target}
    name = f"{__name__}:{model}"
    tight = make_plan(Asked(name, settings, ranks=RANKS, **common))
    limit = int(part * tight.peak_nbytes)
    memory_gib = limit / 2**30
    tight = replace(tight, limit_nbytes=limit)
    found = with_changes(
        tight, Asked(name, settings, ranks=RANKS, memory_gib=memory_gib, **common)
    ).as_dict()["changes"]
    assert len(found) == 3
    assert [*found] == sorted(found, key=lambda each: each["slowdown"] / each["freed_nbytes"])
    for each in found:
        switch = Words(1)
        changed = applied(each["line"], settings, switch)
        again = make_plan(
            Asked(name, changed, ranks=RANKS, memory_gib=memory_gib, **common),
            checkpointing=switch.is_gradient_checkpointing,
        )
        assert again.fits, each
        assert again.peak_nbytes == each["peak_nbytes"] == tight.peak_nbytes - each["freed_nbytes"]
        samples = [p.micro_batch * p.simulation.run.accumulation for p in (again, tight)]
        assert samples[0] == samples[1]


def planned(peak_nbytes: int, *, limit: int = 100, **keys: Any) -> Any:
    return SimpleNamespace(
        peak_nbytes=peak_nbytes, fits=peak_nbytes <= limit, limit_nbytes=limit, time=None,
        own_batch=False, **keys,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain() -> Plan:
    """24 samples in a micro-batch."""
    name = f"{__name__}:narrow"
    return make_plan(Asked(name, config(1, 24), ranks=RANKS, length=1, memory_gib=1e-6))


def test_only_what_a_simulation_confirms_is_a_change(plain):
    """Arithmetic proposes all of them."""
    asked = []

    def simulated(line: str, *, few: bool) -> Any:
        asked.append(line)
        if "stage" in line:
            return planned(100 if json.loads(line) == {"zero_optimization": {"stage": 2}} else 101)
        return None  # cannot be planned

    run = plain.simulation.run
    (only,) = changes_that_fit(replace(plain, limit_nbytes=10**9), simulated)
    assert only.line == json.dumps({"zero_optimization": {"stage": 2}})
    assert run.checkpointing in asked
    assert sum("offload_param" in line for line in asked) == 1


@pytest.mark.parametrize("largest", [0, 1, 2, 6, 12])
def test_of_the_micro_batches_that_fit_the_largest_is_told(plain, largest):
    def simulated(line: str, *, few: bool) -> Any:
        size = json.loads(line).get("train_micro_batch_size_per_gpu") if line[0] == "{" else None
        return planned(100 + (size or 99) - largest)

    found = changes_that_fit(plain, simulated)
    wanted = {"train_micro_batch_size_per_gpu": largest}
    if largest:
        wanted["gradient_accumulation_steps"] = 24 // largest
    assert [json.loads(each.line) for each in found] == ([wanted] if largest else [])
    own = replace(plain, own_batch=True)  # a batch that comes with the model cannot be changed
    assert not changes_that_fit(own, simulated)


def test_a_stage_whose_states_alone_are_too_large_is_not_simulated(plain):
    asked: list[str] = []
    states = plain.simulation.states_nbytes
    changes_that_fit(replace(plain, limit_nbytes=states // 2), lambda line, few: asked.append(line))
    stages = [json.loads(line)["zero_optimization"] for line in asked if "zero_opt" in line]
    assert {"stage": 2} not in stages
    assert any("offload_param" in keys for keys in stages)


def test_the_command_prints_them(tmp_path, monkeypatch):
    (tmp_path / "ds.json").write_text(json.dumps(config(0, 1)))
    monkeypatch.chdir(tmp_path)
    words = ["plan", f"{__name__}:wide", "--config", "ds.json", "--ranks", "4", "--seq", "8"]
    result = CliRunner().invoke(main, [*words, "--memory", "0.0012"])
    assert result.exit_code == 0, result.output
    first, head, change, line, *_ = result.stdout.splitlines()
    assert first.startswith("does not fit")
    assert head.startswith("each of these changes makes it fit (simulated)")
    assert re.match(
        r"  1\. stage 2 instead of stage 0: peak 0\.000\d+ GiB, 0\.000\d+ GiB less; ", change
    )
    assert change.endswith("a step takes +1% (assumed)")
    assert line == '     {"zero_optimization": {"stage": 2}}'
