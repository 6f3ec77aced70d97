"""A save that fails on a disk error raises the same error on all ranks and changes nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_model import train
from saved_runs import (
    check_goes_on,
    check_refused,
    equals_expected,
    everywhere,
    failure,
    keep_expected,
    saved_run,
)
from zeroshard_testing import run_ranks

from zeroshard.checkpoint import save

RANKS = 2
DISK_NBYTES = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 1 MiB. Needs the right to mount."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={DISK_NBYTES},huge=never"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount; failing system calls cover the errors themselves")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def failing(call: str, number: int, *, after: int = 1) -> Iterator[None]:
    """``os.call`` fails from its ``after``-th call on."""
    real, left = getattr(os, call), [after]

    def broken(*args: object) -> object:
        left[0] -= 1
        if left[0] > 0:
            return real(*args)
        raise OSError(number, os.strerror(number))

    setattr(os, call, broken)
    try:
        yield
    finally:
        setattr(os, call, real)


# ---------------------------------------------------------------- a full disk


def fills_up(disk: Path) -> None:
    root = disk / "run"
    with saved_run(root) as engine:
        if engine.global_rank == 0:
            (disk / "filler").write_bytes(bytes(free(disk) - (64 << 10)))
        everywhere(0)
        text = check_refused(
            engine, root, f"{root} has {free(disk):,} bytes free, and this", "Free space"
        )
        assert "(while reserving space)" in text
        save.free_nbytes = lambda _path: 1 << 40  # another process takes the space in between
        try:
            check_refused(engine, root, ".safetensors", "No space left on device (ENOSPC)")
        finally:
            save.free_nbytes = free
        everywhere(0)
        if engine.global_rank == 0:
            (disk / "filler").unlink()
        everywhere(0)
        check_goes_on(engine, root)


def test_a_full_disk_is_told_with_numbers_before_anything_is_written(disk):
    run_ranks(fills_up, RANKS, disk)


# ---------------------------------------------------------------- a disk that fails on one rank

CALLS = {
    "the first block, disk full": (1, "pwrite", errno.ENOSPC, "reserved", ".safetensors"),
    "a block, disk broken": (1, "pwrite", errno.EIO, "reserved", ".safetensors"),
    "a block, over quota": (0, "pwrite", errno.EDQUOT, "reserved", ".safetensors"),
    "the end of a file": (1, "ftruncate", errno.EIO, "half", ".safetensors"),
    "making a file durable": (1, "fsync", errno.EIO, "reserved", ".safetensors"),
    "making the manifest durable": (0, "fsync", errno.EIO, "collected", "manifest.json"),
    "making its names durable": (0, "fsync", errno.ENOSPC, "manifest", ".saving-"),
}


def breaks(root: Path, who: int, call: str, number: int, point: str, file: str) -> None:
    with saved_run(root) as engine, contextlib.ExitStack() as broken:

        def at(here: str) -> None:
            if here == point and engine.global_rank == who:
                broken.enter_context(failing(call, number))

        engine._saver.watch_point = at
        reason = f"{os.strerror(number)} ({errno.errorcode[number]})"
        try:
            check_refused(engine, root, f"rank {who}", file, reason)
        finally:
            broken.close()
            engine._saver.watch_point = lambda _point: None
        check_goes_on(engine, root)


@pytest.mark.parametrize("what", CALLS)
def test_a_disk_that_fails_on_one_rank_ends_the_save_on_all(tmp_path, what):
    run_ranks(breaks, RANKS, tmp_path / "run", *CALLS[what])


def breaks_at_latest(root: Path) -> None:
    """Fails after the checkpoint got its final name and before ``latest`` names it."""
    with saved_run(root) as engine, contextlib.ExitStack() as broken:
        keep_expected(engine, root, "second")

        def at(here: str) -> None:
            if here == "committed":
                broken.enter_context(failing("fsync", errno.EIO))

        engine._saver.watch_point = at
        kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
        broken.close()
        assert kind == "CheckpointError"
        assert len(set(everywhere(text))) == 1
        assert "latest" in text
        engine._saver.watch_point = lambda _point: None
        assert engine.load_checkpoint(root)[0] == str(root / "first")
        engine.load_checkpoint(root, "second")
        assert equals_expected(engine, root, "second") == []
        check_goes_on(engine, root)


def test_a_checkpoint_that_latest_could_not_name_is_whole(tmp_path):
    run_ranks(breaks_at_latest, RANKS, tmp_path / "run")


# ---------------------------------------------------------------- places that cannot be written


def is_refused(root: Path, place: Path, needle: str) -> None:
    with saved_run(root) as engine:
        check_refused(engine, place, needle)
        check_goes_on(engine, root)


@pytest.mark.parametrize(
    ("place", "needle"),
    [
        ("file/run", "Not a directory (ENOTDIR)"),
        ("file", "File exists (EEXIST)"),
        ("/proc/zeroshard/run", "No such file or directory (ENOENT)"),
        ("n" * 300, "File name too long (ENAMETOOLONG)"),
        ("/".join(["n" * 200] * 25), "File name too long (ENAMETOOLONG)"),
    ],
    ids=["below a file", "a file", "not creatable", "long name", "long path"],
)
def test_a_place_that_cannot_be_made_is_refused_everywhere(tmp_path, place, needle):
    (tmp_path / "file").write_text("mine")
    run_ranks(is_refused, RANKS, tmp_path / "run", tmp_path / place, needle)
    assert (tmp_path / "file").read_text() == "mine"


def turns_read_only(disk: Path) -> None:
    root = disk / "run"
    with saved_run(root) as engine:
        everywhere(0)
        if engine.global_rank == 0:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        everywhere(0)
        check_refused(engine, root, "Read-only file system (EROFS)")
        engine.load_checkpoint(root)
        everywhere(0)
        if engine.global_rank == 0:
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        everywhere(0)
        train(engine, 1)
        check_goes_on(engine, root)


def test_a_disk_that_turns_read_only_is_still_read(disk):
    run_ranks(turns_read_only, RANKS, disk)
