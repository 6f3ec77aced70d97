"""A rank that a signal stops for a while in a call of the engine: no healthy run ends because of it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.covering import sampled
from torch import nn
from zeroshard_testing import run_ranks

import zeroshard

PAUSE_S = 4.0

PHASES = {
    "save": lambda engine, folder: engine.save_checkpoint(folder, "b"),
    "load": lambda engine, folder: engine.load_checkpoint(folder, "a"),
    "export": lambda engine, folder: engine.save_16bit_model(folder),
}


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Short intervals for checks and first reports, in tenths of a second. Ranks inherit them."""
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")


def stop_for(seconds: float) -> None:
    """Stop this process. Another one lets it go on."""
    words = f"sleep {seconds}; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", words], start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def run(folder: Path, phase: str, frozen_s: float, late_s: float = 0.0) -> tuple[str, str]:
    """Name and text of the error of a call before which rank 1 is stopped; empty if there is none.

    ``late_s``: how long it works before that.
    """
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "trust": {"frozen_s": frozen_s},
    }
    engine = zeroshard.Engine(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=config)
    try:
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        engine.save_checkpoint(folder, "a")
        if dist.get_rank() == 1:
            time.sleep(late_s)
            stop_for(PAUSE_S if late_s == 0.0 else frozen_s / 2)
        PHASES[phase](engine, folder)
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
    except zeroshard.errors.DistributedError as error:
        return type(error).__name__, str(error)
    finally:
        engine.close()
    return "", ""


@pytest.mark.parametrize("phase", sampled([*PHASES], every=3))
def test_a_pause_shorter_than_allowed_ends_nothing(tmp_path, phase):
    assert run_ranks(run, 2, tmp_path, phase, 60.0, timeout=90) == [("", "")] * 2


@pytest.mark.parametrize("phase", sampled([*PHASES], every=3))
def test_a_longer_pause_names_the_rank_that_was_stopped(tmp_path, phase):
    found = run_ranks(run, 2, tmp_path, phase, 1.5, timeout=90)
    for name, text in found:
        assert name == "RankFrozen", text
        assert text.splitlines()[1].startswith("  rank 1 ("), text
        assert "is stopped by a signal" in text


def test_a_rank_that_was_late_for_longer_may_be_stopped_for_a_while(tmp_path):
    """The others have waited for longer than ``frozen_s``, but the rank has stood still for less."""
    assert run_ranks(run, 2, tmp_path, "save", 3.0, 5.0, timeout=90) == [("", "")] * 2
