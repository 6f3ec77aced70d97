"""The code blocks of the README run unedited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

README = Path(__file__).parents[2] / "README.md"
TRAINS, SAVES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def run(block: str) -> dict:
    names = {"__name__": "readme"}
    exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.smoke
def test_the_first_block_trains(capsys):
    run(TRAINS)
    norm, skipped = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert float(norm) > 0
    assert skipped == "False"


@pytest.mark.smoke
def test_the_second_block_saves_and_loads():
    names = run(SAVES)
    assert names["client_state"] == {"epoch": 3}
    assert names["path"] == f"{names['directory']}/global_step0"


def test_the_changed_loop_trains_and_the_home_page_has_the_same(tmp_path, monkeypatch):
    text, home = README.read_text(), (README.parent / "docs/index.md").read_text()
    [diff] = re.findall(r"```diff\n(.*?)```", text, flags=re.S)
    assert diff in home
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(re.findall(r"```json\n(.*?)```", text, flags=re.S)[0])

    class MyModel(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    after = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("-"))
    dataset = list(torch.ones(12, 8, dtype=torch.bfloat16))
    names = {"MyModel": MyModel, "dataset": dataset}
    exec(compile(after, str(README), "exec"), names)
    with names["model"] as engine:
        assert engine.global_steps == len(dataset) / 4  # of the micro-batch
        assert engine.last_step.grad_norm > 0
