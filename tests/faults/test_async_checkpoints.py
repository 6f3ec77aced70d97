"""An asynchronous save, when training, the engine or the process ends before it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from checkpoint_model import open_engine, train
from saved_runs import STAGE, equals_expected, everywhere, failure, keep_expected, saves
from warm_python import WarmPython
from zeroshard_testing import RankEnd, run_ranks

from zeroshard import Engine
from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.run.address import unused_port

RANKS = 2
BEHIND = {"checkpoint": {"asynchronous": True}}


def check_whole(root: Path, *tags: str) -> None:
    assert set(places.tags(root)) == set(tags)
    for tag in tags:
        with CheckpointReader(root / tag) as saved:
            assert saved.verify() == []


def loads(root: Path, tag: str) -> None:
    with open_engine(STAGE) as engine:
        assert engine.load_checkpoint(root)[0] == str(root / tag)
        assert equals_expected(engine, root, tag) == []


class Gate:
    """Stops an asynchronous save at a named point until the gate is opened."""

    def __init__(self, engine: Engine, point: str = "half") -> None:
        self.passed: list[str] = []
        self._open = threading.Event()
        self._point = point
        engine._saver.watch_point = self._at

    def _at(self, point: str) -> None:
        if point == self._point:
            assert self._open.wait(30)
        self.passed.append(point)

    def open(self, after_s: float = 0.0) -> None:
        threading.Timer(after_s, self._open.set).start()


# ---------------------------------------------------------------- one after the other


def saves_twice(root: Path) -> None:
    with open_engine(STAGE, **BEHIND) as engine:
        gate = Gate(engine)
        train(engine, 1)
        engine.save_checkpoint(root, "first")
        keep_expected(engine, root, "first")
        assert "half" not in gate.passed  # it has not ended
        train(engine, 2)
        gate.open(after_s=0.3)
        engine.save_checkpoint(root, "second")
        assert gate.passed.count("pruned") >= (engine.global_rank == 0)  # the first is complete
        keep_expected(engine, root, "second")
        train(engine, 2)


def test_a_second_save_waits_for_the_first_and_both_are_whole(tmp_path):
    run_ranks(saves_twice, RANKS, tmp_path / "run")
    check_whole(tmp_path / "run", "first", "second")
    run_ranks(loads, RANKS, tmp_path / "run", "second")


# ---------------------------------------------------------------- an error behind


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def fails_behind(root: Path, told_by: str) -> None:
    """Rank 1's disk fails during an asynchronous save. ``told_by`` is the call that raises the error."""
    errors = Errors()
    logging.getLogger("zeroshard").addHandler(errors)
    real = os.pwrite
    engine = open_engine(STAGE, **BEHIND)
    try:
        train(engine, 1)
        engine.save_checkpoint(root, "first")
        keep_expected(engine, root, "first")
        engine.wait_for_checkpoint()

        def broken(fd: int, data: object, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        gate = Gate(engine, "reserved")
        train(engine, 1)
        assert engine.save_checkpoint(root, "second")
        if engine.global_rank == 1:
            os.pwrite = broken
        gate.open()
        train(engine, 2)  # the training step does not raise the error
        kind, text = failure(
            {
                "wait": engine.wait_for_checkpoint,
                "save": lambda: engine.save_checkpoint(root, "third"),
                "load": lambda: engine.load_checkpoint(root),
                "close": engine.close,
            }[told_by]
        )
        os.pwrite = real
        assert kind == "CheckpointError"
        assert "rank 1: " in text
        assert "Input/output error (EIO)" in text
        assert errors.texts == [text]
        assert places.tags(root) == ["first"]
        if told_by != "close":
            assert len(set(everywhere(text))) == 1
            engine.wait_for_checkpoint()  # an error is raised once
            train(engine, 1)
            engine.save_checkpoint(root, "third")
            keep_expected(engine, root, "third")
    finally:
        os.pwrite = real
        engine.close()
        logging.getLogger("zeroshard").removeHandler(errors)


@pytest.mark.parametrize("told_by", ["wait", "save", "load", "close"])
def test_an_error_behind_is_told_once_by_the_next_call_that_waits(tmp_path, told_by):
    root = tmp_path / "run"
    run_ranks(fails_behind, RANKS, root, told_by)
    newest = "first" if told_by == "close" else "third"
    check_whole(root, *{"first", newest})
    run_ranks(loads, RANKS, root, newest)
    assert [name for name in os.listdir(root) if name.startswith(".")] == []


def raises_while_it_fails(root: Path) -> None:
    with open_engine(STAGE, **BEHIND) as engine:
        real = os.pwrite
        train(engine, 1)

        def broken(fd: int, data: object, offset: int) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        os.pwrite = broken
        try:
            engine.save_checkpoint(root, "first")
            engine._saver._thread.join()
        finally:
            os.pwrite = real
        raise KeyError("the program's own")


def test_an_error_of_the_program_is_not_hidden_by_one_behind(tmp_path):
    ends = run_ranks(raises_while_it_fails, 1, tmp_path / "run", keep_exceptions=True)
    assert isinstance(ends[0], KeyError)


# ---------------------------------------------------------------- a rank that is killed


def dies_behind(root: Path, who: tuple[int, ...]) -> tuple[str, str, float]:
    engine = open_engine(STAGE, **BEHIND)
    engine.load_checkpoint(root)
    train(engine, 1)

    def at(point: str) -> None:
        if point == "half" and engine.global_rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._saver.watch_point = at
    engine.save_checkpoint(root, "second")
    begun_s = time.monotonic()
    kind, text = failure(engine.wait_for_checkpoint)
    seconds = time.monotonic() - begun_s
    engine.close(text)
    return kind, text, seconds


@pytest.mark.parametrize("who", [(0,), (1,), (0, 1)], ids=str)
def test_a_rank_killed_behind_is_named_and_the_one_before_stays(tmp_path, who):
    root = tmp_path / "run"
    run_ranks(saves, RANKS, root, "first")
    deaths = dict.fromkeys(who, signal.SIGKILL)
    ends = run_ranks(dies_behind, RANKS, root, who, expect_death=deaths, timeout=40)
    for kind, text, seconds in (end for end in ends if not isinstance(end, RankEnd)):
        assert kind == "RankLost"
        assert f"rank {who[0]} ended" in text
        assert seconds < 10
    check_whole(root, "first")
    run_ranks(loads, RANKS, root, "first")


# ---------------------------------------------------------------- a program that ends

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from checkpoint_model import open_engine, train
from saved_runs import keep_expected
root, how = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
delay_s = 0.3 + dist.get_rank()  # one waits for the other, longer than it trusts without looking
engine = open_engine(3, checkpoint={"asynchronous": True})
train(engine, 1)
keep_expected(engine, root, "first")
engine._saver.watch_point = lambda point: point == "half" and time.sleep(delay_s)
engine.save_checkpoint(root, "first")
assert not (root / "first").exists()
if how == "exit":
    sys.exit(3)
if how == "raises inside":
    with engine:
        raise RuntimeError("the program's own")
if how == "rank 1 raises" and dist.get_rank() == 1:
    raise RuntimeError("the program's own")
if how == "rank 1 raises":
    train(engine, 1)
"""
CODES = {"exit": 3, "raises inside": 1, "rank 1 raises": 1}


def run_program(root: Path, how: str) -> list[tuple[int, str]]:
    port = unused_port()
    tests = Path(__file__).parent
    common = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        ),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
    }
    with contextlib.ExitStack() as started:
        programs = []
        for rank in range(RANKS):
            program = WarmPython(
                [sys.executable, "-c", PROGRAM, str(root), how],
                cwd=Path.cwd(),
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            started.callback(program.close)
            programs.append(program)
        outputs = ["".join(program.communicate(timeout=60)) for program in programs]
        return [(program.returncode, out) for program, out in zip(programs, outputs, strict=True)]


@pytest.mark.parametrize("how", CODES)
def test_a_program_that_ends_after_a_save_ends_when_that_is_complete(tmp_path, how):
    root = tmp_path / "run"
    ends = run_program(root, how)
    assert [code for code, _ in ends] == [CODES[how]] * RANKS, ends
    check_whole(root, "first")
    run_ranks(loads, RANKS, root, "first")


# ---------------------------------------------------------------- weights are written meanwhile


def exports_meanwhile(root: Path) -> None:
    with open_engine(STAGE, trust={"sections": {"save": 10.0}}, **BEHIND) as engine:
        gate = Gate(engine)
        train(engine, 1)
        engine.save_checkpoint(root, "first")
        keep_expected(engine, root, "first")
        gate.open(after_s=0.3)
        engine.save_16bit_model(root.parent / "weights")


def test_weights_written_during_a_save_do_not_disturb_it(tmp_path):
    run_ranks(exports_meanwhile, RANKS, tmp_path / "run", timeout=30)
    check_whole(tmp_path / "run", "first")
    assert len(list((tmp_path / "weights").iterdir())) >= 1
    run_ranks(loads, RANKS, tmp_path / "run", "first")
