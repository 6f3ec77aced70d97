"""Real trackers: each gets every value of every step, and the program's own runs are joined.

`make test` installs the packages into the folder .trackers, apart from the environment of the tests:
Trainer and Accelerate would report to every tracker that they can import.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm_python
from support.covering import sampled

ROOT = Path(__file__).parents[2]
TRACKERS = ROOT / ".trackers"
SAMPLES = [8, 16, 24, 32, 40, 48]
EVERY_STEP = {
    "train_loss", "lr", "loss_scale", "grad_norm", "grad_norm_clipped", "skipped", "exposed_comm_ms",
    "elapsed_time_ms_forward", "elapsed_time_ms_backward", "elapsed_time_ms_step",
}  # fmt: skip
LATER_STEPS = {"step_time_ms", "samples_per_second", "tokens_per_second"}

pytestmark = pytest.mark.skipif(
    not (TRACKERS / ".ready").exists(), reason="no trackers: run make .trackers/.ready"
)


def run(program: str, folder: Path, *words: str) -> None:
    """Run a program in ``folder`` with the trackers."""
    path = os.pathsep.join([str(ROOT / "src"), str(TRACKERS)])
    done = warm_python.run(
        [
            sys.executable,
            str(Path(__file__).with_name(program)),
            str(folder / "found.json"),
            *words,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "ZEROSHARD_DUMP_DIR": ""},
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    assert "switched off" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("opened_by", sampled(["joined", "own"], every=2))
def test_every_tracker_keeps_equal_values_at_equal_steps(tmp_path, opened_by):
    run("tracked.py", tmp_path, opened_by)
    found = json.loads((tmp_path / "found.json").read_text())
    told = found.pop("function")
    losses = found.pop("losses")
    names = {f"Train/Samples/{name}" for name in EVERY_STEP}
    later = {f"Train/Samples/{name}" for name in LATER_STEPS}
    assert told.keys() == names | later | {"Train/Samples/host_memory_peak_gib"}
    assert [step for step, _ in told["Train/Samples/lr"]] == SAMPLES
    assert all([step for step, _ in told[name]] == SAMPLES for name in names)
    assert all([step for step, _ in told[name]] == SAMPLES[1:] for name in later)
    assert told["Train/Samples/train_loss"] == [list(each) for each in zip(SAMPLES, losses)]
    assert all(value > 0 for name in later for _, value in told[name])
    clipped = [value for _, value in told["Train/Samples/grad_norm_clipped"]]
    assert all(value <= 0.05 * (1 + 1e-5) for value in clipped)  # gradient_clipping of the program
    assert found.keys() == {"tensorboard", "csv", "wandb", "trackio", "mlflow", "record"}
    for tracker, kept in found.items():
        kept.pop("my/loss", None)
        assert kept.keys() == told.keys(), tracker
        for name, points in kept.items():
            assert [step for step, _ in points] == [step for step, _ in told[name]], (tracker, name)
            if tracker == "tensorboard":  # it stores float32
                assert [v for _, v in points] == pytest.approx([v for _, v in told[name]], rel=1e-6)
            else:
                assert points == told[name], (tracker, name)


@pytest.mark.slow
@pytest.mark.parametrize("library", sampled(["trainer", "accelerate"], every=2))
def test_runs_that_a_trainer_or_accelerate_opened_are_joined(tmp_path, library):
    """Each tracker has one run, with the values of the library and those of the engine."""
    run("tracked_runs.py", tmp_path, library)
    run("tracked_runs.py", tmp_path, "read")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["runs"] == {"mlflow": 1, "wandb": 1, "trackio": 1}
    theirs = "loss" if library == "trainer" else "theirs"
    assert [step for step, _ in found["kept"]["mlflow"][theirs]] == (
        [1, 2, 3] if library == "trainer" else [0, 1, 2]
    )
    for tracker, kept in found["kept"].items():
        losses, rates = (kept[f"Train/Samples/{name}"] for name in ("train_loss", "lr"))
        assert [step for step, _ in losses] == [step for step, _ in rates] == [8, 16, 24], tracker
        assert losses == found["kept"]["mlflow"]["Train/Samples/train_loss"]
        if library == "trainer":
            told = [value for _, value in found["kept"]["mlflow"]["loss"]]
            assert [value for _, value in losses] == pytest.approx(told, abs=1e-4)


def test_a_full_disk_switches_off_tensorboard():
    path = os.pathsep.join([str(ROOT / "src"), str(TRACKERS)])
    test = ["tests/unit/test_monitors.py", "-k", "full and tensorboard", "-p", "no:cacheprovider"]
    done = warm_python.run(
        [sys.executable, "-m", "pytest", "-v", *test],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        timeout=100,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
