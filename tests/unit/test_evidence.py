"""Which frames of a stack are the program's, wherever it lies?"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from zeroshard.watchdog.rank_status import stack_line


@pytest.mark.parametrize("folder", ["zeroshard/engine", "torch", "zeroshard/src/zeroshard/comm"])
def test_a_program_in_a_folder_of_any_name_is_named(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "train.py"
    program: dict = {"look": lambda: stack_line(threading.get_ident())}
    exec(compile("def forward():\n    return look()\n", str(file), "exec"), program)
    assert "train.py:2 forward" in program["forward"]()


def test_frames_of_the_library_are_left_out() -> None:
    line = stack_line(threading.get_ident())
    assert line.startswith("test_evidence.py")
