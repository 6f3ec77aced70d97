"""The tour of one training step names the files that a step executes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.optim import native_adam

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "zeroshard"
TRANSPORT = {"comm/recorder.py", "run/recordings.py"}
"""Named in the tour, as is ``comm/``: which of its files run depends on the transport."""
LAST_ELEMENTS = {"optim/kernels.py"}
"""Run only on a rank that has elements beyond a multiple of 64; the others are in the compiled update."""

REPORTS = {
    *(f"metrics/{name}.py" for name in ("monitors", "run_log", "step_report", "step_stream")),
    "engine/out_of_memory.py",
    "device/ops.py", "memory/host_limits.py", "offload/stores.py", "watchdog/pace.py",
}  # fmt: skip
"""Run for the monitors and the record, and where steps are timed: some on rank 0 only, some seldom."""
ON_DEVICES = {f"optim/triton_{name}.py" for name in ("check", "kernels", "update")}
"""Run only on a rank with an accelerator."""


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


def _visited(body) -> set[str]:
    seen: set[str] = set()

    def note(frame, event, _arg):
        if event == "call":
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(None)
    paths = (Path(name) for name in seen if name.startswith(str(SOURCE)))
    return {str(path.relative_to(SOURCE)) for path in paths}


CONFIG = {
    "train_batch_size": 8,
    "unit_min_numel": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 3},
}


def _engine() -> zeroshard.Engine:
    return zeroshard.Engine(nn.Sequential(*(_Block() for _ in range(3))), config=CONFIG)


def _step(engine: zeroshard.Engine) -> None:
    loss = engine(torch.randn(4, 8, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    engine.step()


def _named(section: str) -> set[str]:
    text = (ROOT / "docs" / "tour.md").read_text().split(f"## {section}")[1].split("\n## ")[0]
    return {n.split(":")[0] for n in re.findall(r"`([a-z]+/[a-z_0-9]+\.py[^`]*)`", text)}


@pytest.mark.smoke
@on_ranks(2)
def test_a_step_visits_the_files_that_the_tour_names():
    native_adam.wait()
    with _engine() as engine:
        _step(engine)
        _step(engine)
        visited = _visited(lambda: _step(engine))
    visited = {path for path in visited if not path.startswith("comm/")}
    named = _named("One step")
    read_along = {"core/layout.py", *REPORTS}
    assert visited <= named | read_along, f"not in the tour: {sorted(visited - named - read_along)}"
    assert named <= visited | TRANSPORT | LAST_ELEMENTS | ON_DEVICES | REPORTS | {
        "core/stages.py"
    }, f"not visited: {named - visited}"


@pytest.mark.smoke
@on_ranks(2)
def test_a_checkpoint_visits_the_files_that_the_tour_names(tmp_path):
    def save_and_load() -> None:
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)

    with _engine() as engine:
        _step(engine)
        visited = _visited(save_and_load)
    folders = ("checkpoint/", "engine/checkpoint_")
    visited = {path for path in visited if path.startswith(folders)}
    named = {path for path in _named("Saving and loading") if path.startswith(folders)}
    assert visited == named
