"""Runs the benchmark script for one GPU without a GPU."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import warm_python

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"
Load = Callable[[str], ModuleType]


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script without a visible GPU."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    return warm_python.run(command, cwd=ROOT, env=env, timeout=150)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports modules of the script by their names, for one test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = {*sys.modules}
    yield importlib.import_module
    for name in {*sys.modules} - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def rehearse(
    load: Load, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str
) -> tuple[int, dict[str, list[dict[str, object]]]]:
    """Run the script in this process and its turns in processes that have imported torch.

    The first turn runs in a new interpreter, as every turn does for a user. Returns the exit code and
    the rows of each step.
    """
    run, turns = load("run"), load("turns")

    def turn(command: list[str], env: dict[str, str], limit_s: float) -> object:
        if command[2] == "machine":
            return turns.Ended(*started(command, env, limit_s))
        done = warm_python.run(command, cwd=ROOT, env=env, timeout=limit_s)
        return turns.Ended(done.stdout, done.stderr, done.returncode)

    started = real(turns.run_process)
    monkeypatch.setattr(turns, "run_process", turn)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rows: dict[str, list[dict[str, object]]] = {}
    monkeypatch.setattr(
        load("results").Results,
        "finish",
        lambda _, step, found, machine: rows.update({step: found}),
    )
    monkeypatch.setattr(sys, "argv", ["run.py", "--folder", str(folder), *arguments])
    return run.main(), rows


def real(run_process: Callable[..., object]) -> Callable[..., tuple[str, str, int | None]]:
    def call(*given: object) -> tuple[str, str, int | None]:
        ended = run_process(*given)
        return ended.out, ended.err, ended.code  # type: ignore[attr-defined]

    return call
