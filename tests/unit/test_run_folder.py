"""The folder of a run: its name, who shares it, and which runs stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from zeroshard.run import run_folder as module
from zeroshard.run.run_folder import (
    default_root,
    find_run,
    make_run_folder,
    new_run_id,
    run_folder,
    run_id,
)


def test_the_launcher_s_name_wins_and_cannot_leave_the_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("ZEROSHARD_RUN_ID", "../../etc/x y")
    assert run_folder(str(tmp_path)) == tmp_path / "etc-x-y"


def test_ranks_of_one_launcher_share_a_name_and_other_processes_do_not():
    module._own_run_id.cache_clear()
    shared = run_id({"RANK": "0"})
    assert shared == run_id({"RANK": "1"})
    assert shared.endswith(f"-{os.getppid()}")
    assert run_id({}).endswith(f"-{os.getpid()}")


def test_only_the_newest_runs_of_the_default_directory_stay(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "default_root", lambda: tmp_path / "runs")
    monkeypatch.setattr(module, "KEPT_RUNS", 3)
    for number in range(6):
        monkeypatch.setenv("ZEROSHARD_RUN_ID", f"run{number}")
        folder = make_run_folder(None)
        (folder / "steps-0-1-0.jsonl").touch()
        os.utime(folder, (number, number))
    names = sorted(each.name for each in (tmp_path / "runs").iterdir())
    assert names == ["run2", "run3", "run4", "run5"]  # three and the new one
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700


def folder_of(root: Path, name: str, at_s: int, ranks: str = "") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "steps-0-1-0.jsonl").touch()
    if ranks:
        (folder / "ranks.json").write_text(ranks)
    os.utime(folder, (at_s, at_s))
    return folder


RANKS = '{"ranks": [{"process": {"pid": %s}}]}'


@pytest.mark.parametrize(
    ("name", "ranks", "stays"),
    [
        (f"20260131-235959-node1-{os.getpid()}", "", True),
        ("named", RANKS % os.getpid(), True),
        ("20260131-235959-node1-4194305", "", False),
        ("named", RANKS % 4194305, False),
        ("named", "no JSON", False),
        ("named", RANKS % '"x"', False),
    ],
    ids=["a launcher", "a rank", "no launcher", "no rank", "no JSON", "no number"],
)
def test_a_run_of_which_a_process_lives_stays(monkeypatch, tmp_path, name, ranks, stays):
    monkeypatch.setattr(module, "default_root", lambda: tmp_path / "runs")
    monkeypatch.setattr(module, "KEPT_RUNS", 1)
    old = folder_of(tmp_path / "runs", name, 0, ranks)
    for number in (1, 2):
        folder_of(tmp_path / "runs", f"later{number}", number)
    monkeypatch.setenv("ZEROSHARD_RUN_ID", "new")
    make_run_folder(None)
    assert old.exists() == stays
    assert (tmp_path / "runs" / "later2").exists()
    assert not (tmp_path / "runs" / "later1").exists()


@pytest.mark.parametrize(("age_s", "stays"), [(3600, True), (90_000, False)])
def test_a_run_of_another_container_stays_for_a_day(monkeypatch, tmp_path, age_s, stays):
    """That no process here has the number of one of its ranks does not say that it has ended."""
    monkeypatch.setattr(module, "default_root", lambda: tmp_path / "runs")
    monkeypatch.setattr(module, "KEPT_RUNS", 1)
    ranks = '{"ranks": [{"process": {"pid": 4194305, "space": "boot pid:[7]"}}]}'
    old = folder_of(tmp_path / "runs", "named", 0, ranks)
    for file in old.iterdir():
        os.utime(file, (time.time() - age_s,) * 2)
    folder_of(tmp_path / "runs", "later", 1)
    monkeypatch.setenv("ZEROSHARD_RUN_ID", "new")
    make_run_folder(None)
    assert old.exists() == stays


def test_what_is_no_run_stays(monkeypatch, tmp_path):
    root = tmp_path / "runs"
    monkeypatch.setattr(module, "default_root", lambda: root)
    monkeypatch.setattr(module, "KEPT_RUNS", 1)
    (root / "photos").mkdir(parents=True)
    (root / "photos" / "one.jpg").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "steps-0-1-0.jsonl").touch()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    for number in range(3):
        folder_of(root, f"run{number}", number)
    monkeypatch.setenv("ZEROSHARD_RUN_ID", "new")
    make_run_folder(None)
    assert (root / "photos" / "one.jpg").exists()
    assert (tmp_path / "elsewhere" / "steps-0-1-0.jsonl").exists()
    assert sorted(each.name for each in root.iterdir()) == ["link", "new", "photos", "run2"]


@pytest.mark.parametrize("kind", ["link", "foreign", "open to others", "file"])
def test_the_default_directory_is_another_one_if_its_name_is_taken(monkeypatch, tmp_path, kind):
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setenv("ZEROSHARD_RUN_ID", "run")
    usual = default_root()
    assert usual.parent == tmp_path / "tmp"
    usual.parent.mkdir()
    (tmp_path / "target").mkdir()
    if kind == "link":
        usual.symlink_to(tmp_path / "target")
    elif kind == "file":
        usual.touch()
    else:
        usual.mkdir()
        usual.chmod(0o777 if kind == "open to others" else 0o700)
    if kind == "foreign":
        monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert make_run_folder(None) == tmp_path / "home/.cache/zeroshard/runs/run"
    assert not list((tmp_path / "target").iterdir())
    assert kind == "file" or not list(usual.iterdir())


def test_nothing_is_removed_from_a_directory_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "KEPT_RUNS", 1)
    (tmp_path / "mine").mkdir()
    for number in range(3):
        monkeypatch.setenv("ZEROSHARD_RUN_ID", f"run{number}")
        make_run_folder(str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4


def test_a_run_is_found_in_its_folder_or_in_the_directory_of_runs(tmp_path):
    for number in range(3):
        (tmp_path / f"run{number}").mkdir()
        (tmp_path / f"run{number}" / "steps-0-1-0.jsonl").touch()
        os.utime(tmp_path / f"run{number}", (number, number))
    assert find_run(tmp_path) == tmp_path / "run2"
    assert find_run(tmp_path / "run1") == tmp_path / "run1"


def test_a_run_that_lives_is_preferred_to_a_newer_one_that_ended(tmp_path):
    names = [f"20260101-000000-node1-{pid}" for pid in (os.getpid(), 2**31 - 1)]
    for number, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps-0-1-0.jsonl").touch()
        os.utime(tmp_path / name, (number, number))
    assert find_run(tmp_path) == tmp_path / names[1]
    assert find_run(tmp_path, living=True) == tmp_path / names[0]
    os.utime(tmp_path / names[0], (5, 5))
    assert find_run(tmp_path) == tmp_path / names[0]
    assert find_run(tmp_path, living=False) == tmp_path / names[1]
    (tmp_path / names[0] / "steps-0-1-0.jsonl").unlink()
    assert find_run(tmp_path, living=True) == tmp_path / names[1]


def test_a_newer_run_of_another_user_is_left_out_and_said(tmp_path, monkeypatch):
    for number in range(4):
        folder = tmp_path / f"run{number}"
        folder.mkdir()
        (folder / "steps-0-1-0.jsonl").touch()
        os.utime(folder, (number, number))
    strangers = {(tmp_path / name).stat().st_ino for name in ("run0", "run2", "run3")}
    monkeypatch.setattr(module, "is_mine", lambda about: about.st_ino not in strangers)
    said: list[str] = []
    assert find_run(tmp_path, said.append) == tmp_path / "run1"
    assert said == [
        f"run1 is your newest run in {tmp_path}. 2 newer ones of other users are left out: give a "
        "folder to see one of them."
    ]
    assert find_run(tmp_path / "run3", said.append) == tmp_path / "run3" and len(said) == 1
    monkeypatch.setattr(module, "is_mine", lambda _about: False)
    with pytest.raises(FileNotFoundError, match=r"of yours\. It holds 4 of other users"):
        find_run(tmp_path)


def test_the_report_of_a_launcher_alone_is_a_run(tmp_path):
    """Its ranks ended before they joined."""
    (tmp_path / "run1").mkdir()
    (tmp_path / "run1" / "exit-node1-0.json").touch()
    assert find_run(tmp_path) == tmp_path / "run1"


@pytest.mark.parametrize("name", ["nothing", "file", "empty"])
def test_what_is_no_run_is_said(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"not a directory|holds no run"):
        find_run(tmp_path / name)


def test_a_new_name_has_time_and_process():
    assert new_run_id(7).endswith("-7")
    assert len(new_run_id(7).split("-")[0]) == 8
