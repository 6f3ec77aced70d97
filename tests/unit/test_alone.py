"""Tests that are marked ``alone`` run alone on several workers, and wait for their turn only briefly."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from alone import TURNS, Turns, runs_alone

TESTS = Path(__file__).parents[1]


def gate_is_kept(folder: Path) -> bool:
    probe = os.open(folder / "gate", os.O_RDWR)
    try:
        fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(probe)
    return False


def enters(turns: Turns, said: list[str], name: str, *, alone: bool) -> threading.Thread:
    def body() -> None:
        with turns.turn(alone=alone):
            said.extend([f"{name} begins", f"{name} ends"])

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def test_a_test_that_runs_alone_waits_for_others_and_is_before_those_that_come_later(tmp_path):
    first, second, third, fourth = every = [Turns(tmp_path) for _ in range(4)]
    said: list[str] = []
    with first.turn(alone=False), second.turn(alone=False):  # beside each other
        alone = enters(third, said, "alone", alone=True)
        while not gate_is_kept(tmp_path):
            assert alone.is_alive()
        later = enters(fourth, said, "later", alone=False)
        later.join(0.05)  # it cannot get in
        said.append("both end")
    alone.join()
    later.join()
    assert said == ["both end", "alone begins", "alone ends", "later begins", "later ends"]
    for turns in every:
        turns.close()


def test_a_failed_test_leaves_the_room(tmp_path):
    ours, theirs = Turns(tmp_path), Turns(tmp_path)
    for alone in (True, False):
        try:
            with ours.turn(alone=alone):
                raise KeyError
        except KeyError:
            pass
        with theirs.turn(alone=True):
            pass
    ours.close()
    theirs.close()


PROGRAM = """
import os, time
from pathlib import Path
import pytest

INSIDE = Path(os.environ["INSIDE"])

def stays(name):
    (INSIDE / name).touch()
    seen = []
    for _ in range(20):
        seen += os.listdir(INSIDE)
        time.sleep(0.002)
    (INSIDE / name).unlink()
    return {*seen} - {name}

@pytest.mark.parametrize("i", range(10))
def test_beside(i):
    assert "alone" not in {name[:5] for name in stays(f"beside {NAME} {i}")}

@pytest.mark.alone
@pytest.mark.parametrize("i", range(5))
def test_alone(i):
    assert stays(f"alone {NAME} {i}") == set()
"""


def test_no_test_of_another_worker_runs_beside_a_marked_one(tmp_path):
    pytest.importorskip("xdist")
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    alone: see alone.py\n")
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(PROGRAM.replace("{NAME}", name))
    outer = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_")}
    options = "-p xdist -p alone -n 2 --dist loadfile -p no:cacheprovider"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options.split()],
        cwd=tmp_path,
        env={
            **outer, "INSIDE": str(inside), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "30 passed" in done.stdout


def test_marks_are_found_and_workers_have_the_locks(request):
    assert (TURNS in request.config.stash) == hasattr(request.config, "workerinput")
    assert not runs_alone(request.node)
    request.node.add_marker("alone")
    assert runs_alone(request.node)
