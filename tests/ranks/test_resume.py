"""``initialize(resume=...)``: from the newest checkpoint that is complete, undamaged and finite."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.errors import CheckpointError, UsageError


def opened(folder: Path | str | None, *, width: int = 4, **config: Any) -> Any:
    torch.manual_seed(0)
    return zeroshard.initialize(
        model=nn.Linear(width, 4),
        training_data=torch.utils.data.TensorDataset(torch.arange(12.0)),
        resume=folder,
        config={
            "train_batch_size": 2,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            **config,
        },
    )[0]


def saved(folder: Path, steps: int) -> None:
    """Checkpoints step-1, step-2, ... in ``folder``, each with its number as client_state."""
    with opened(None) as engine:
        for step, _ in zip(range(1, steps + 1), engine.training_dataloader):
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
            engine.save_checkpoint(folder, tag=f"step-{step}", client_state={"step": step})


def told() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("zeroshard")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # tests before this one may have restored none
    return lines


@on_ranks(2)
def test_a_run_without_a_checkpoint_starts_anew_with_one_line(tmp_path):
    lines = told()
    with opened(tmp_path / "absent") as engine:
        assert engine.resumed is not None
        assert (engine.resumed.path, engine.global_steps) == (None, 0)
        said = [line for line in lines if line.startswith("resume")]
        assert len(said) == (engine.global_rank == 0)
        assert not said or "has no checkpoint, so the run starts anew" in said[0]


@on_ranks(2)
def test_a_run_goes_on_with_its_state_its_client_state_and_its_place_in_the_data(tmp_path):
    saved(tmp_path, 2)
    with opened(tmp_path) as engine:
        assert engine.resumed is not None
        assert engine.resumed.client_state == {"step": 2}
        assert (Path(engine.resumed.path).name, engine.global_steps) == ("step-2", 2)
        assert len([*engine.training_dataloader]) == 4, "of six batches of an epoch two were used"


@on_ranks(2)
def test_the_newest_one_counts_although_latest_was_not_replaced(tmp_path):
    saved(tmp_path, 2)
    (tmp_path / "latest").write_text("step-1")
    with opened(tmp_path) as engine:
        assert engine.global_steps == 2


@on_ranks(1)
def test_a_save_that_was_ended_before_its_first_latest_counts(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "latest").unlink()
    with opened(tmp_path) as engine:
        assert engine.global_steps == 1


@on_ranks(1)
def test_damaged_incomplete_and_not_finite_ones_are_passed_over_with_one_line_each(tmp_path):
    saved(tmp_path, 3)
    with opened(tmp_path) as engine:  # the fourth: NaN in a trained parameter
        with zeroshard.zero.GatheredParameters(engine.module.weight, modifier_rank=0):
            engine.module.weight.data[0, 0] = float("nan")
        engine.save_checkpoint(tmp_path, tag="step-4")
    largest = max((tmp_path / "step-3").glob("*.safetensors"), key=lambda f: f.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) - 9] ^= 1
    largest.write_bytes(content)
    (tmp_path / ".step-9.saving-00000000").mkdir()
    lines = told()
    with opened(tmp_path) as engine:
        assert Path(engine.resumed.path).name == "step-2"
    (line,) = [line for line in lines if "Using step-2 instead" in line]
    assert "step-4: 'weight' (value) has values that are not finite" in line
    assert "step-3" in line
    with opened(None) as engine:
        engine.load_checkpoint(tmp_path)  # asked for by name or by latest, it is loaded as it is
        assert engine.global_steps == 3


@on_ranks(2)
def test_a_checkpoint_of_another_model_is_an_error_with_names(tmp_path):
    saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match="weight"):
        opened(tmp_path, width=5)


@on_ranks(1)
def test_auto_takes_the_directory_of_the_launcher_or_of_preemption(tmp_path):
    saved(tmp_path / "a", 1)
    saved(tmp_path / "b", 2)
    with pytest.raises(UsageError, match=r'resume="auto": the directory .* is not known'):
        opened("auto")
    with opened("auto", preemption={"save_dir": str(tmp_path / "b")}) as engine:
        assert engine.global_steps == 2
    os.environ["ZEROSHARD_CHECKPOINT_DIR"] = str(tmp_path / "a")
    try:
        with opened("auto", preemption={"save_dir": str(tmp_path / "b")}) as engine:
            assert engine.global_steps == 1
    finally:
        del os.environ["ZEROSHARD_CHECKPOINT_DIR"]
