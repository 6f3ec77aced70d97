"""Finds the frames of a stack that belong to the user's program, in any folder."""

from __future__ import annotations

import _thread
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import zeroshard
from zeroshard.errors import ZeroShardError
from zeroshard.watchdog.stacks import stack_line, stacks

CONFIG = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
NET = torch.nn.Linear(2, 2)
MISTAKES = {
    "no model": {},
    "no parameters": {"model": torch.nn.Identity()},
    "a misspelt key": {"model": NET, "config": {**CONFIG, "zero_optimisation": {}}},
    "two configurations": {"model": NET, "config_params": CONFIG},
    "no file": {"model": NET, "config": "nowhere.json"},
    "a data set": {"model": NET, "training_data": 3},
    "an optimizer": {"model": NET, "optimizer": 3},
    "a group": {"model": NET, "model_parameters": [{"params": 3}]},
    "a mesh": {"model": NET, "mesh": 3},
    "a unit": {
        "model": NET, "config": {**CONFIG, "units": ["x"], "zero_optimization": {"stage": 3}},
    },
}  # fmt: skip
"""Mistakes in a call of initialize, and its arguments."""


@pytest.mark.parametrize("folder", ["zeroshard/engine", "torch", "zeroshard/src/zeroshard/comm"])
def test_a_program_in_a_folder_of_any_name_is_named(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "train.py"
    program: dict = {"look": lambda: stack_line(threading.get_ident())}
    exec(compile("def forward():\n    return look()\n", str(file), "exec"), program)
    assert "train.py:2 forward" in program["forward"]()


def test_frames_of_the_library_are_left_out() -> None:
    line = stack_line(threading.get_ident())
    assert line.startswith("test_program_frames.py")


def test_a_hook_on_torchs_own_thread_is_seen_while_the_program_waits_for_backward():
    """Backward on a device runs hooks there. Here the thread and torch's wait for it are pretended."""
    inside, over = threading.Event(), threading.Event()

    def stuck_hook() -> None:
        inside.set()
        over.wait(30)

    ended = _thread.allocate_lock()
    ended.acquire()
    calls: dict = {"wait": ended.acquire}
    torchs_file = os.path.join(os.path.dirname(torch.__file__), "autograd", "graph.py")
    exec(compile("def _engine_run_backward(): wait()", torchs_file, "exec"), calls)
    program = threading.Thread(target=calls["_engine_run_backward"])
    program.start()
    _thread.start_new_thread(stuck_hook, ())
    assert inside.wait(10)
    try:
        until = time.monotonic() + 10
        while "stuck_hook" not in (line := stack_line(program.ident)):
            assert time.monotonic() < until, line
        assert "of torch:" in stacks() and "stuck_hook" in stacks()
    finally:
        over.set()
        ended.release()
        program.join()


def printed(error: BaseException, capsys: pytest.CaptureFixture[str]) -> str:
    """What Python prints of an error that nobody catches."""
    capsys.readouterr()
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


@pytest.fixture
def own_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of this process is put back after the test."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_initialize_is_told_without_frames_of_the_library(mistake, own_hook, capsys):
    with pytest.raises(ZeroShardError) as caught:
        zeroshard.initialize(**{"config": CONFIG, **MISTAKES[mistake]})
    text = printed(caught.value, capsys)
    assert "test_program_frames.py" in text
    assert "/zeroshard/" not in text
    assert str(caught.value).splitlines()[0] in text


def test_a_checkpoint_of_another_model_is_told_once(own_hook, capsys, tmp_path):
    with zeroshard.Engine(torch.nn.Linear(2, 2), config=CONFIG) as engine:
        engine.save_checkpoint(tmp_path)
    with pytest.raises(ZeroShardError) as caught:
        zeroshard.initialize(model=torch.nn.Linear(3, 2), config=CONFIG, resume=tmp_path)
    text = printed(caught.value, capsys)
    assert "'weight' has shape [2, 3]" in text
    assert text.count("Traceback") == 1
    assert "/zeroshard/" not in text


def test_an_error_of_the_program_keeps_all_its_frames(own_hook, capsys):
    def made(params):
        raise ValueError("a bad schedule")

    with pytest.raises(ValueError) as caught:
        zeroshard.initialize(model=torch.nn.Linear(2, 2), config=CONFIG, optimizer=made)
    text = printed(caught.value, capsys)
    assert "in made" in text
    assert "engine/draft.py" in text
