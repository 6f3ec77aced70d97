"""The programs of ``docs/integrations.md`` run unedited on two ranks."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from by_name import no_deepspeed_on_ranks  # noqa: F401
from programs import ROOT, launched, on_warm_ranks, torchrun

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
PAGE = (ROOT / "docs" / "integrations.md").read_text()


def skip_without(package: str) -> None:
    """Skip without importing the package here, because the import would set environment variables."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def program(heading: str, folder: Path) -> Path:
    """All code under a heading, in order, as one program that runs in ``folder``."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert blocks, heading
    file = folder / "program.py"
    file.write_text(f"import os\nos.chdir({str(folder)!r})\n" + "\n".join(blocks))
    return file


@pytest.mark.usefixtures("no_deepspeed_on_ranks")
def test_the_script_of_accelerate(tmp_path):
    said = on_warm_ranks(2, program("Accelerate", tmp_path))
    rates = re.findall(r"^loss [\d.]+ norm [\d.]+ rate ([\d.]+)$", said, re.MULTILINE)
    assert len(rates) == 4
    assert rates == sorted(rates, reverse=True)
    assert {"state", "weights.bin", "model"} <= {path.name for path in tmp_path.iterdir()}
    assert (tmp_path / "state" / "pytorch_model").is_dir()


@pytest.mark.usefixtures("no_deepspeed_on_ranks")
def test_the_trainer_and_lora(tmp_path):
    skip_without("peft")
    on_warm_ranks(2, program("Transformers", tmp_path))
    assert (tmp_path / "final" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "checkpoint-4" / "latest").is_file()
    adapters = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= adapters
    assert "model.safetensors" not in adapters


def test_the_strategy_of_lightning(tmp_path):
    skip_without("lightning")
    file = program("Lightning", tmp_path)
    launched(*torchrun(2), str(file), cwd=tmp_path, imports=["lightning"], PYTHONPATH="")
    assert (tmp_path / "fit.ckpt").is_dir()


def test_no_block_of_the_page_is_left_out():
    """Every block is under a heading whose code is run."""
    assert PAGE.count("```python") == sum(
        PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0].count("```python")
        for heading in ("Accelerate", "Transformers", "Lightning")
    )
