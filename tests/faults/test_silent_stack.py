"""The stack of a process that runs but does not answer is read from outside, and nothing ends by that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from zeroshard.comm.host import Process, catches, fate_of, this_process
from zeroshard.run.recordings import STACKS
from zeroshard.watchdog import stacks
from zeroshard.watchdog.stacks import SIGNAL, ask, innermost

PROGRAM = """
import signal, sys, time
from pathlib import Path
from zeroshard.comm.host import this_process
from zeroshard.watchdog.stacks import SIGNAL, StackFile

folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "has its own":
    signal.signal(SIGNAL, lambda *_: (folder / "own").touch())
if how != "has none":
    stack = StackFile(folder)
if how == "closed":
    stack.close()

def deep(level):
    if level:
        return deep(level - 1)
    return sum(range(20_000))

def hold():
    print(this_process().started, flush=True)
    if how == "holds the lock":
        sum(range(10**10))
    while True:
        deep(100)

hold()
"""


@pytest.fixture
def started(tmp_path):
    """A function that starts the program and gives it as a process, and its folder."""
    running: list[subprocess.Popen[str]] = []

    def start(how: str) -> tuple[subprocess.Popen[str], Process]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), how]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(program)
        assert program.stdout is not None
        began = program.stdout.readline().strip()
        here = this_process()
        return program, Process(here.host, here.space, program.pid, began)

    yield start
    for program in running:
        program.kill()
        program.wait()


@pytest.mark.parametrize("how", ["holds the lock", "runs"])
def test_the_stack_of_the_main_thread_is_there(how, started, tmp_path):
    _, process = started(how)
    frame = innermost(ask(process, this_process(), tmp_path / STACKS))
    assert frame.startswith("<string>:"), frame
    assert frame.endswith((" hold",) if how == "holds the lock" else (" hold", " deep")), frame


def test_a_program_that_runs_is_asked_and_paused_a_hundred_times(started, tmp_path):
    program, process = started("runs")
    here, path = this_process(), tmp_path / STACKS
    for _ in range(100):
        assert ask(process, here, path)
        os.kill(process.pid, signal.SIGSTOP)
        while fate_of(process, here)[0] == "runs":
            time.sleep(0.001)
        assert ask(process, here, path) == ""  # it may be a debugger's
        os.kill(process.pid, signal.SIGCONT)
        while fate_of(process, here)[0] == "stopped":
            time.sleep(0.001)
    assert program.poll() is None


@pytest.mark.parametrize("how", ["has none", "has its own", "closed"])
def test_a_program_is_not_ended_or_disturbed(how, started, tmp_path, monkeypatch):
    program, process = started(how)
    if how != "has its own":
        tmp_path.mkdir(exist_ok=True)
        (tmp_path / STACKS).touch()
    if how == "closed":  # the signal was on its way
        monkeypatch.setattr(stacks, "_WAIT_S", 0.0)
    assert ask(process, this_process(), tmp_path / STACKS) == ""
    assert program.poll() is None
    assert catches(process.pid, SIGNAL) == (how != "has none")
    assert not (tmp_path / "own").exists()


def test_another_process_with_the_same_number_gets_no_signal(started, tmp_path):
    program, process = started("runs")
    other = Process(process.host, process.space, process.pid, "1")
    assert ask(other, this_process(), tmp_path / STACKS) == ""
    assert program.poll() is None


def test_a_program_whose_thread_opens_it_has_the_stack_of_the_main_thread(tmp_path):
    opened: list[stacks.StackFile] = []
    thread = threading.Thread(target=lambda: opened.append(stacks.StackFile(tmp_path)))
    thread.start()
    thread.join()
    found = ask(this_process(), this_process(), Path(tmp_path / STACKS))
    opened[0].close()
    assert Path(__file__).name in found
    assert not (tmp_path / STACKS).exists()
