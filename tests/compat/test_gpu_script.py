"""Is the benchmark script for one GPU sound where there is none?"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import zeroshard

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "gpu"


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as a user would who has no GPU."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the script, which finds its neighbours as when the script runs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for neighbour in ("shapes", "trainers"):
        if neighbour in sys.modules:
            monkeypatch.delitem(sys.modules, neighbour)
    return module


def test_without_gpu_one_line_says_so_and_nothing_is_measured(tmp_path: Path) -> None:
    done = script("--out", str(tmp_path / "found.json"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "CUDA" in done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir())


def test_list_names_each_protocol_and_its_share_of_the_time() -> None:
    lines = script("--list", "--minutes", "5").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["checks", "B6", "B1", "B2", "B3", "B4", "B5"]
    assert (
        200 < sum(float(line.split()[1]) for line in lines) < 300
    )  # the rest measures the machine


def test_sizes_are_those_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = load("trainers", monkeypatch)
    shapes = load("shapes", monkeypatch)
    for name, shape in shapes.SHAPES.items():
        built = trainers.build(shape, "meta", dtype=torch.bfloat16)
        assert sum(p.numel() for p in built.parameters()) == shape.numel
        if name.endswith("B"):
            assert shape.numel / 1e9 == pytest.approx(float(name[:-1]), rel=0.25)
        assert torch.get_default_dtype() == torch.float32


def test_three_billion_fit_into_80_gb_and_seven_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = load("shapes", monkeypatch)
    assert shapes.SHAPES["3B"].fits(80 * 10**9, 2048)
    assert not shapes.SHAPES["7B"].fits(80 * 10**9, 2048)
    assert not shapes.SHAPES["7B"].fits(141 * 10**9, 2048)


def test_full_use_is_all_of_the_promised_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = load("shapes", monkeypatch)
    shape = shapes.SHAPES["1.5B"]
    matrices = sum(
        p.numel()
        for name, p in load("trainers", monkeypatch)
        .build(shape, "meta", dtype=torch.bfloat16)
        .named_parameters()
        if p.dim() == 2 and not name.startswith("place")
    )
    attention = 6 * shape.layers * shape.width * shape.context
    assert shape.flops_per_token == pytest.approx(6 * matrices + attention, rel=1e-3)
    rate = 989e12 / shape.flops_per_token
    assert shapes.mfu(shape, rate, shapes.peak_tflops("NVIDIA H200")) == pytest.approx(1.0)
    assert shapes.peak_tflops("an unknown GPU") is None


def test_a_rehearsal_goes_through_every_task(tmp_path: Path) -> None:
    """Checks hold, state off the GPU is trained with too, and nothing is written."""
    done = script("--rehearse", "--only", "checks", "B2", "B6", "--minutes", "90",
                  "--systems", "plain", "ZeroShard stage 2",
                  "--out", str(tmp_path / "found.json"))  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "train ZeroShard stage 2 bf16 7B" in done.stdout
    assert "not in this version" not in done.stdout
    assert "error" not in done.stdout
    assert "exit code" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_a_protocol_without_time_left_says_so() -> None:
    done = script("--rehearse", "--only", "B2", "--minutes", "0.1")
    assert "B2 ran out of its time" in done.stdout


def test_the_first_difference_to_the_plain_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = load("checks", monkeypatch)
    one, two = torch.ones(()), torch.full((), 2.0)
    same = ([one, one], {"weight": one})
    assert checks.difference(same, same) == ""
    assert "loss of step 2" in checks.difference(same, ([one, two], {"weight": one}))
    assert "'weight'" in checks.difference(same, ([one, one], {"weight": two}))
    assert "bias" in checks.difference(same, ([one, one], {"bias": one}))


def test_a_turn_that_dies_gives_its_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load("run", monkeypatch)
    assert run.answer_in("noise\nRESULT " + json.dumps({"a": 1}), "", 0) == {"a": 1}
    assert "no kernel" in run.answer_in("", "trace\nRuntimeError: no kernel", 1)["error"]


def test_who_trains_differently_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    run = load("run", monkeypatch)
    rows = [{"losses": [4.0]}, {"losses": [4.01]}, {"losses": [4.5]}, {"losses": [float("nan")]}]
    assert ["error" in row for row in run.with_distance(rows)] == [False, False, True, True]


def test_a_wait_is_noted_with_its_phase_and_the_librarys_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit = load("audit", monkeypatch)
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def waiting(*_: object) -> torch.Tensor:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)
        return torch.zeros(())

    trainer = SimpleNamespace(forward=waiting, backward=lambda loss: None, step=waiting)
    found = audit._named_waits(trainer, (torch.zeros(()), torch.zeros(())))
    assert [wait["phase"] for wait in found] == ["forward", "step"]
    assert "in waiting" in found[0]["frames"][0]
    assert modes == ["warn", "default"]


def test_the_librarys_frames_are_known_by_its_folder_and_not_by_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    audit = load("audit", monkeypatch)
    package = Path(zeroshard.__file__).parent
    program = ("/home/me/zeroshard/train.py", 3, "main", "step()")
    library = (str(package / "engine" / "engine.py"), 9, "step", "a()")
    torchs = ("/x/torch/b.py", 7, "c", "d")
    frames = audit.frames_of(traceback.StackSummary.from_list([program, library, torchs]))
    assert frames == ["zeroshard/engine/engine.py:9 in step: a()"]
    alone = audit.frames_of(traceback.StackSummary.from_list([program]))
    assert alone == ["/home/me/zeroshard/train.py:3 in main: step()"]
