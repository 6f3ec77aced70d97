"""The folder of a run: its name, who shares it, and which runs stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zeroshard.launch import run_folder as module
from zeroshard.launch.run_folder import find_run, make_run_folder, new_run_id, run_folder, run_id


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
        os.utime(folder, (number, number))
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == ["run3", "run4", "run5"]
    assert (tmp_path / "runs").stat().st_mode & 0o777 == 0o700


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


@pytest.mark.parametrize("name", ["nothing", "file", "empty"])
def test_what_is_no_run_is_said(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"not a directory|holds no run"):
        find_run(tmp_path / name)


def test_a_new_name_has_time_and_process():
    assert new_run_id(7).endswith("-7")
    assert len(new_run_id(7).split("-")[0]) == 8
