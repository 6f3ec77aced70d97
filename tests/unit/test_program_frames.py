"""Finds the frames of a stack that belong to the user's program, in any folder."""

from __future__ import annotations

import _thread
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from zeroshard.watchdog.rank_status import stack_line, stacks


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
