"""Both programs of ``docs/fsdp2.md`` print the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from programs import ROOT, launched, on_warm_ranks, torchrun
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

PAGE = (ROOT / "docs" / "fsdp2.md").read_text()


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for code, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE, re.DOTALL):
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def numbers(said: str) -> list[float]:
    """Losses and norms of the steps, in order."""
    lines = re.findall(r"^step \d: loss [\d.]+, norm [\d.]+$", said, re.MULTILINE)
    return [float(text) for line in lines for text in re.findall(r"\d+\.\d+", line)]


def test_a_loop_with_fsdp2_and_with_zeroshard_print_the_same_losses_and_norms(inside):
    before = numbers(launched(*torchrun(2), "before.py", cwd=inside, PYTHONPATH=""))
    after = numbers(on_warm_ranks(2, inside / "after.py"))
    assert len(before) == 6
    assert after == pytest.approx(before, rel=0.01)  # the last digit may be rounded otherwise


def test_weights_of_a_checkpoint_of_torch_load_into_the_model(inside):
    code = (inside / "before.py").read_text().replace("range(3)", "range(1)")
    (inside / "before.py").write_text(code)
    launched(*torchrun(2), "before.py", cwd=inside, PYTHONPATH="")
    dcp_to_torch_save("checkpoint", "full.pt")  # what the command of the page calls
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    [load] = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "full.pt" in code
    ]
    assert str(eval(load, {"model": model, "torch": torch})) == "<All keys matched successfully>"
