"""The last checkpoint stays complete, whenever and however a save is killed."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_model import open_engine, train
from saved_runs import STAGE, contents, equals_expected, failure, keep_expected, saves
from zeroshard_testing import RankEnd, run_ranks

from zeroshard import Engine
from zeroshard.checkpoint import directory as places
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.save import FAULT_POINTS

RANKS = 2
KEEP = {"checkpoint": {"keep_last": 9}}


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A run that was saved once, as ``first``."""
    root = tmp_path_factory.mktemp("good") / "run"
    run_ranks(saves, RANKS, root, "first")
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """A copy of ``good``."""
    shutil.copytree(good.parent, tmp_path, dirs_exist_ok=True)
    return tmp_path / good.name


def resumed(root: Path, stage: int = STAGE, **keys) -> Engine:
    """The run after loading its newest checkpoint and training one step."""
    engine = open_engine(stage, **{**KEEP, **keys})
    engine.load_checkpoint(root)
    train(engine, 1)
    return engine


# ---------------------------------------------------------------- a rank that is killed


def dies(root: Path, tag: str, point: str, who: tuple[int, ...]) -> tuple[str, str, float]:
    """Kill the ranks ``who`` when the save reaches ``point``. Returns the errors of the others and their
    times."""
    engine = resumed(root)
    keep_expected(engine, root, "second")

    def at(here: str) -> None:
        # Operations of one rank for all come after the last point of the other ranks.
        mine = point if engine.global_rank == 0 or point not in BY_ONE_RANK else "collected"
        if here == mine and engine.global_rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._saver.watch_point = at
    begun_s = time.monotonic()
    kind, text = failure(lambda: engine.save_checkpoint(root, tag))
    seconds = time.monotonic() - begun_s
    engine.close(text)
    return kind, text, seconds


def goes_on(root: Path, tag: str, expected: str) -> str:
    """New ranks load ``expected``, and their next save succeeds."""
    with open_engine(STAGE, **KEEP) as engine:
        path, _ = engine.load_checkpoint(root, tag or None)
        assert equals_expected(engine, root, expected) == []
        train(engine, 1)
        engine.save_checkpoint(root, "third")
        keep_expected(engine, root, "third")
    with open_engine(STAGE) as engine:
        engine.load_checkpoint(root)
        assert equals_expected(engine, root, "third") == []
    return Path(path).name


def killed(root: Path, tag: str, point: str, who: tuple[int, ...]) -> None:
    deaths = dict.fromkeys(who, signal.SIGKILL)
    ends = run_ranks(dies, RANKS, root, tag, point, who, expect_death=deaths, timeout=50)
    for kind, text, seconds in (end for end in ends if not isinstance(end, RankEnd)):
        assert kind == "RankLost"
        assert f"rank {who[0]}" in text
        assert seconds < 10


def check_whole(root: Path, tags: set[str]) -> None:
    """The list of checkpoints is exactly ``tags``, and all of them are complete."""
    assert set(places.tags(root)) == tags
    for tag in tags:
        with CheckpointReader(root / tag) as saved:
            assert saved.verify() == []


def check_tidy(root: Path) -> None:
    """No files of unfinished saves are left."""
    known = {*places.tags(root), "latest", "zero_to_fp32.py"}
    assert [n for n in os.listdir(root) if n not in known and not n.startswith("frozen-")] == []


BY_ONE_RANK = ("manifest", "frozen", "aside", "committed", "latest", "pruned")
NEW_IS_THERE = ("committed", "latest", "pruned")
BOTH = (0, 1)
DEATHS = [
    ("planned", (1,)), ("planned", (0,)), ("made", (0,)), ("made", (1,)), ("reserved", (1,)),
    ("reserved", BOTH), ("agreed", (0,)), ("agreed", (1,)), ("half", (0,)), ("half", BOTH),
    ("written", (1,)), ("collected", BOTH), ("manifest", (0,)), ("frozen", BOTH), ("frozen", (0,)),
    ("committed", (0,)), ("committed", BOTH), ("latest", BOTH), ("pruned", (0,)),
]  # fmt: skip


@pytest.mark.parametrize(("point", "who"), DEATHS, ids=str)
def test_a_save_killed_at_any_point_is_there_as_a_whole_or_not_at_all(root, point, who):
    killed(root, "second", point, who)
    saved = {"first", "second"} if point in NEW_IS_THERE else {"first"}
    check_whole(root, saved)
    newest = "second" if point in ("latest", "pruned") else "first"
    assert run_ranks(goes_on, RANKS, root, "", newest) == [newest] * RANKS
    check_whole(root, saved | {"third"})
    check_tidy(root)


def test_a_rank_killed_when_its_part_is_done_takes_nothing_with_it(root):
    killed(root, "second", "collected", (1,))
    check_whole(root, {"first", "second"})
    assert run_ranks(goes_on, RANKS, root, "", "second") == ["second"] * RANKS


def test_a_save_killed_before_latest_can_be_loaded_by_its_tag(root):
    killed(root, "second", "committed", (0,))
    assert run_ranks(goes_on, RANKS, root, "second", "second") == ["second"] * RANKS


# ---------------------------------------------------------------- the same name again


@pytest.mark.parametrize("tag", ["", "first"], ids=["latest", "by name"])
def test_the_old_checkpoint_comes_back_if_its_replacement_is_killed(root, tag):
    killed(root, "first", "aside", (0,))
    assert not (root / "first").exists()  # the moment between two renames
    assert run_ranks(goes_on, RANKS, root, tag, "first") == ["first"] * RANKS
    check_whole(root, {"first", "third"})
    check_tidy(root)


def saves_elsewhere(root: Path) -> None:
    with open_engine(STAGE, **KEEP) as engine:
        train(engine, 1)
        engine.save_checkpoint(root, "other")


def test_the_next_save_takes_it_back_as_well(root):
    killed(root, "first", "aside", (0,))
    run_ranks(saves_elsewhere, RANKS, root)
    check_whole(root, {"first", "other"})
    check_tidy(root)
    run_ranks(goes_on, RANKS, root, "first", "first")


@pytest.mark.parametrize("point", ["manifest", "committed"])
def test_a_replacement_is_there_once_it_has_the_name(root, point):
    killed(root, "first", point, (0,))
    newest = "first" if point == "manifest" else "second"
    run_ranks(goes_on, RANKS, root, "first", newest)
    check_whole(root, {"first", "third"})


def refuses_the_second_rename(root: Path) -> None:
    engine = resumed(root)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if ".saving-" in path.name and target.name == "first":
            raise OSError(5, os.strerror(5), str(path))
        return real(path, target)

    before = contents(root / "first")
    with engine:
        Path.rename = rename
        try:
            kind, text = failure(lambda: engine.save_checkpoint(root, "first"))
        finally:
            Path.rename = real
        assert kind == "CheckpointError"
        assert "(EIO)" in text
        assert contents(root / "first") == before
        assert [name for name in os.listdir(root) if name.startswith(".")] == []
        engine.save_checkpoint(root, "first")


def test_the_old_checkpoint_stays_if_the_new_one_cannot_have_its_name(root):
    run_ranks(refuses_the_second_rename, 1, root)


# ---------------------------------------------------------------- every point, and the store


def passes(root: Path) -> list[str]:
    seen: list[str] = []
    with resumed(root) as engine:
        engine._saver.watch_point = seen.append
        engine.save_checkpoint(root, "first")
    return seen


def test_every_named_point_is_passed_in_order(root):
    assert tuple(dict.fromkeys(run_ranks(passes, RANKS, root)[0])) == FAULT_POINTS


def serves_and_dies(root: Path, point: str) -> tuple[str, str, float]:
    """Rank 0, whose process serves the store, dies."""
    dist.init_process_group("gloo", init_method="env://")
    return dies(root, "second", point, (0,))


@pytest.mark.parametrize("point", ["half", "manifest"])
def test_the_rank_that_serves_the_store_is_named_when_it_dies(root, point):
    death = {0: signal.SIGKILL}
    ends = run_ranks(
        serves_and_dies, RANKS, root, point, expect_death=death, group=False, timeout=50
    )
    kind, text, seconds = ends[1]
    assert kind == "RankLost", text
    assert "rank 0" in text
    assert seconds < 10
    run_ranks(goes_on, RANKS, root, "", "first")
