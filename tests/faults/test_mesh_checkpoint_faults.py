"""Checkpoints of a tensor-parallel run that is killed, or whose disk fails: whole, or not there."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from checkpoint_model import differences
from saved_runs import everywhere, failure
from tensor_parallel_model import TP, everything, open_engine, train
from test_checkpoint_disk_faults import failing
from test_checkpoint_faults import check_tidy, check_whole

from zeroshard.testing import RankEnd, run_ranks

STAGE = 3
RANKS = TP.world_size


def saves(root: Path) -> None:
    with open_engine(TP, STAGE) as engine:
        train(engine, 1)
        engine.save_checkpoint(root, "first")
        state = everything(engine)
        if engine.global_rank == 0:
            torch.save(state, root.parent / "first.pt")


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("good") / "run"
    run_ranks(saves, RANKS, root)
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """A run with the checkpoint ``first``."""
    shutil.copytree(good.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / good.name


def dies(root: Path, point: str, who: tuple[int, ...]) -> tuple[str, str]:
    engine = open_engine(TP, STAGE)
    engine.load_checkpoint(root)
    train(engine, 1)

    def at(here: str) -> None:
        if here == point and engine.global_rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._saver.watch_point = at
    kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
    engine.close(text)
    return kind, text


def goes_on(root: Path, expected: str) -> str:
    with open_engine(TP, STAGE) as engine:
        path, _ = engine.load_checkpoint(root)
        if expected == "first":
            assert differences(everything(engine), torch.load(root.parent / "first.pt")) == []
        train(engine, 1)
        engine.save_checkpoint(root, "third")
        return Path(path).name


@pytest.mark.parametrize(
    ("point", "who", "newest"),
    [
        ("planned", (3,), "first"),
        ("reserved", (0, 2), "first"),
        ("half", (1,), "first"),
        ("written", (2,), "first"),
        ("manifest", (0,), "first"),
        ("latest", (0,), "second"),
    ],
    ids=str,
)
def test_a_killed_save_is_there_as_a_whole_or_not_at_all(root, point, who, newest):
    deaths = dict.fromkeys(who, signal.SIGKILL)
    ends = run_ranks(dies, RANKS, root, point, who, expect_death=deaths, timeout=50)
    for kind, text in (end for end in ends if not isinstance(end, RankEnd)):
        assert kind == "RankLost"
        assert f"rank {who[0]}" in text
    check_whole(root, {"first", newest})
    assert run_ranks(goes_on, RANKS, root, newest) == [newest] * RANKS
    check_whole(root, {"first", newest, "third"})
    check_tidy(root)


def breaks(root: Path, who: int) -> None:
    with open_engine(TP, STAGE) as engine, contextlib.ExitStack() as broken:
        engine.load_checkpoint(root)
        before = everything(engine)

        def at(here: str) -> None:
            if here == "reserved" and engine.global_rank == who:
                broken.enter_context(failing("pwrite", errno.ENOSPC))

        engine._saver.watch_point = at
        kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
        broken.close()
        assert kind == "CheckpointError"
        assert f"rank {who}" in text
        assert "No space left on device (ENOSPC)" in text
        assert len(set(everywhere(text))) == 1
        assert differences(everything(engine), before) == []
        engine._saver.watch_point = lambda _point: None
        train(engine, 1)
        engine.save_checkpoint(root, "third")


@pytest.mark.parametrize("who", [0, 3])
def test_a_full_disk_of_one_rank_ends_the_save_on_all(root, who):
    run_ranks(breaks, RANKS, root, who)
    check_whole(root, {"first", "third"})
    check_tidy(root)


def flips(root: Path) -> None:
    """One bit of a box is flipped: the damage is named, and nothing is trained from it."""
    with open_engine(TP, STAGE) as engine:
        kind, text = failure(lambda: engine.load_checkpoint(root, "first"))
        assert kind == "CheckpointError"
        assert "is damaged between bytes" in text
        assert len(set(everywhere(text))) == 1


def test_a_damaged_box_is_refused_on_all_ranks(root):
    path = root / "first" / "rank-00001-of-00004.safetensors"
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    run_ranks(flips, RANKS, root)
