"""A fault of a run with state on disk raises an error on every rank and leaves no files."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import math
import os
import re
import shutil
import signal
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit import outcome
from torch import nn
from zeroshard_testing import RankEnd, run_ranks

import zeroshard
from zeroshard.core import tiers
from zeroshard.engine import build_runtime
from zeroshard.errors import DiskError, UsageError
from zeroshard.memory import storage
from zeroshard.offload import capacity_check
from zeroshard.zero import safe_get_full_fp32_param

QUICK = {"first_report_s": 1.0, "frozen_s": 2.0, "grace_s": 5.0}
DISK_NBYTES = 16 << 20
STORES = {1: ("optimizer",), 2: ("optimizer",), 3: ("optimizer", "param")}
LOST = (
    "The state that is stored there is lost: continue from the last checkpoint, with nvme_path on "
    "a disk that works."
)


class Net(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


@pytest.fixture(autouse=True)
def _chunks_of_others_are_left_alone():
    before = tiers.CHUNK_NUMEL
    yield
    tiers.CHUNK_NUMEL = before


def config(place: Path | str, stage: int = 3, **more) -> dict:
    """All state that this stage can store on disk is on disk, in chunks much smaller than a unit."""
    tiers.CHUNK_NUMEL = 512
    disk = {"device": "nvme", "nvme_path": str(place)}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "units": ["blocks.*"],
        "unit_min_numel": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": stage,
            **{f"offload_{kind}": {**disk, **more.pop(kind, {})} for kind in STORES[stage]},
        },
        "trust": QUICK,
        **more,
    }


def backward(engine: zeroshard.Engine) -> float:
    width = engine.module.blocks[0].in_features
    loss = engine(torch.ones(2, width, dtype=torch.bfloat16)).float().square().mean()
    engine.backward(loss)
    return loss.item()


def step(engine: zeroshard.Engine) -> float:
    loss = backward(engine)
    engine.step()
    return loss


# ---------------------------------------------------------------- a place to swap in


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB where this user may mount one; everything is given back in the end."""
    yield from disk_at(tmp_path)


def disk_at(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={DISK_NBYTES},huge=never"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    own = subprocess.run(command, capture_output=True, check=False).returncode == 0
    before = free(place)
    try:
        yield place
        assert os.listdir(place) == []
        assert not own or free(place) == before
    finally:
        if own:
            subprocess.run(["umount", "--lazy", str(place)], check=True)


def free(place: Path) -> int:
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def swap_files(place: Path) -> int:
    """Files below ``place`` that this process holds open; the kernel calls them deleted."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{place}/")
    return found


def held_nbytes(engine: zeroshard.Engine) -> int:
    ledger = engine.runtime.ledger
    names = ("parameters", "gradients", "master", "optimizer", "scratch", "gathered")
    return sum(ledger.nbytes(name, tier) for name in names for tier in tiers.TIERS.values())


# ---------------------------------------------------------------- a rank that is killed


def killed_while_swapping(place: Path, stage: int, number: int) -> tuple[str, str, float]:
    def body() -> None:
        with zeroshard.Engine(Net(), config=config(place, stage)) as engine:
            step(engine)
            if dist.get_rank() == 1:
                kill_at_write(number)
            for _ in range(3):
                step(engine)

    return outcome(body)


def kill_at_write(number: int) -> None:
    """The process dies inside a write. Earlier writes are on disk, later ones are not."""
    real, left = os.pwritev, [number]

    def deadly(fd: int, buffers: list, offset: int) -> int:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, buffers, offset)

    os.pwritev = deadly


@pytest.mark.parametrize("number", [2, 9], ids=["a gradient", "a page"])  # of four units
@pytest.mark.parametrize("stage", STORES)
def test_a_rank_killed_while_it_swaps_is_named_and_its_disk_comes_back(place, stage, number):
    body, death = killed_while_swapping, {1: signal.SIGKILL}
    results = run_ranks(body, 2, place, stage, number, expect_death=death, timeout=40)
    assert isinstance(results[1], RankEnd)
    kind, text, seconds = results[0]
    assert kind == "RankLost"
    assert "rank 1" in text
    assert "ended" in text
    assert seconds < 20


# ---------------------------------------------------------------- a disk that fails on one rank


def break_disk(call: str, fault: int | None, *, after: int = 3) -> None:
    """From its ``after``-th call on ``os.call`` fails with an error number, or transfers nothing."""
    real, left = getattr(os, call), [after]

    def broken(fd: int, buffers: list, offset: int) -> int:
        left[0] -= 1
        if left[0] > 0:
            return real(fd, buffers, offset)
        if fault is None:
            return 0
        raise OSError(fault, os.strerror(fault))

    setattr(os, call, broken)


def failing(
    place: Path, stage: int, call: str, fault: int | None, *, closes: bool
) -> tuple[str, str, float, int]:
    """Rank 1's disk fails in its second step. Returns the error of each rank, and files left after
    close()."""
    real = {name: getattr(os, name) for name in ("pwritev", "preadv")}
    files = -1

    def body() -> None:
        nonlocal files
        engine = zeroshard.Engine(Net(), config=config(place, stage))
        try:
            step(engine)
            if dist.get_rank() == 1:
                break_disk(call, fault)
            for _ in range(3):
                step(engine)
        except BaseException as error:
            engine.close(str(error) if closes else "")
            raise
        finally:
            files = swap_files(place)
            assert held_nbytes(engine) == 0

    try:
        return (*outcome(body), files)
    finally:
        for name, function in real.items():
            setattr(os, name, function)


FAULTS = {
    "a write": ("pwritev", errno.EIO, "writing", "Input/output error (EIO)"),
    "a full disk": ("pwritev", errno.ENOSPC, "writing", "No space left on device (ENOSPC)"),
    "a read": ("preadv", errno.EIO, "reading", "Input/output error (EIO)"),
    "an unreadable page": ("preadv", None, "reading", "unreadable page, preadv moved 0 bytes"),
}


@pytest.mark.parametrize("closes", [True, False], ids=["says why", "just closes"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_disk_that_fails_on_one_rank_ends_the_run_on_all(place, stage, fault, closes):
    call, number, doing, why = FAULTS[fault]
    results = run_ranks(
        failing, 2, place, stage, call, number, kwargs={"closes": closes}, timeout=40
    )
    kind, text, seconds, files = results[1]
    assert kind == "DiskError"
    assert re.fullmatch(
        rf"{doing} \d+ bytes at offset \d+ of the swap file {re.escape(str(place))}/\S+ ended after "
        rf"0 bytes: {re.escape(why)}\. {re.escape(LOST)}",
        text,
    ), text
    assert files == 0
    assert seconds < 20
    kind, text, seconds, files = results[0]
    assert kind == "RankLost"
    assert "rank 1" in text
    assert not closes or f"{doing} " in text
    assert files == 0
    assert seconds < 20


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_program_that_a_disk_ends_tells_the_others(place, stage, call):
    body = failing_uncaught
    results = run_ranks(body, 2, place, stage, call, expect_death={1: 1}, timeout=40)
    kind, text, seconds = results[0]
    assert kind == "RankLost"
    assert (
        "The cause is in the output of rank 1; the others only lost their connection to it." in text
    )
    assert seconds < 20


def failing_uncaught(place: Path, stage: int, call: str) -> tuple[str, str, float]:
    engine = zeroshard.Engine(Net(), config=config(place, stage))
    step(engine)
    if dist.get_rank() == 1:
        break_disk(call, errno.EIO)
        for _ in range(3):
            step(engine)

    def body() -> None:
        with engine:
            for _ in range(3):
                step(engine)

    return outcome(body)


def gradient_extents(engine: zeroshard.Engine) -> dict[int, int]:
    """The extents of gradients in the swap file: offset -> length."""
    extents = [buffer.store._extent for buffer in engine.runtime.reducer.buffers]
    return {extent.offset: extent.nbytes for extent in extents}


def break_gradients(patch: pytest.MonkeyPatch, extents: dict[int, int], call: str, fault: int):
    """``os.call`` fails only in extents of gradients."""
    real = getattr(os, call)

    def broken(fd: int, buffers: list, offset: int) -> int:
        if offset in extents:
            raise OSError(fault, os.strerror(fault))
        return real(fd, buffers, offset)

    patch.setattr(os, call, broken)


def failing_at_gradients(
    place: Path, stage: int, call: str, fault: int
) -> tuple[str, str, float, dict[int, int]]:
    extents: dict[int, int] = {}

    def body() -> None:
        with zeroshard.Engine(Net(depth=6), config=config(place, stage)) as engine:
            step(engine)
            extents.update(gradient_extents(engine))
            with pytest.MonkeyPatch.context() as patch:
                if dist.get_rank() == 1:
                    break_gradients(patch, extents, call, fault)
                for _ in range(3):
                    step(engine)

    found = outcome(body)
    assert swap_files(place) == 0
    return (*found, extents)


@pytest.mark.parametrize("fault", ["a write", "a full disk", "a read"])
@pytest.mark.parametrize("stage", STORES)
def test_a_gradient_that_does_not_reach_the_disk_or_come_back_ends_the_run_on_all(
    place, stage, fault
):
    call, number, doing, why = FAULTS[fault]
    results = run_ranks(failing_at_gradients, 2, place, stage, call, number, timeout=40)
    kind, text, seconds, extents = results[1]
    assert kind == "DiskError"
    found = re.fullmatch(
        rf"{doing} (\d+) bytes at offset (\d+) of the swap file {re.escape(str(place))}/\S+ ended after "
        rf"0 bytes: {re.escape(why)}\. {re.escape(LOST)}",
        text,
    )
    assert found, text
    assert int(found[1]) <= extents[int(found[2])]
    assert seconds < 20
    kind, text, seconds, _ = results[0]
    assert kind == "RankLost"
    assert "rank 1" in text
    assert f"{doing} " in text
    assert seconds < 20


def test_a_backward_whose_gradients_could_not_be_written_can_be_taken_again(place, monkeypatch):
    """Nothing was updated, so that the batch can be repeated when the disk works again."""
    with build_at(place) as engine:
        expected = [step(engine) for _ in range(4)]
    with build_at(place) as engine:
        losses = [step(engine) for _ in range(2)]
        with monkeypatch.context() as patch:
            break_gradients(patch, gradient_extents(engine), "pwritev", errno.EIO)
            with pytest.raises(DiskError, match="writing"):
                backward(engine)
        engine.zero_grad()
        losses += [step(engine) for _ in range(2)]
    assert losses == expected


# ---------------------------------------------------------------- half of an update


@pytest.mark.parametrize(("call", "doing"), [("pwritev", "writing"), ("preadv", "reading")])
@pytest.mark.parametrize("stage", STORES)
def test_a_step_that_failed_in_the_middle_cannot_be_taken_again(
    place, stage, call, doing, monkeypatch
):
    with zeroshard.Engine(Net(), config=config(place, stage)) as engine:
        step(engine)
        backward(engine)
        with monkeypatch.context() as patch:
            fail_at(patch, call, 5)
            with pytest.raises(DiskError):
                engine.step()
        for _ in range(2):
            with pytest.raises(UsageError) as caught:
                engine.step()
            assert str(caught.value).startswith(
                f"an update ended in the middle (DiskError: {doing} "
            )
            assert str(caught.value).endswith(
                "parameters before it are one step ahead of those after it, and pending transfers "
                "are lost. Close this engine, build a new one and continue from the last "
                "checkpoint."
            )
        weight = next(engine.module.parameters())
        for use in (
            engine.zero_grad,
            lambda: step(engine),
            lambda: list(engine.iter_full_params()),
            lambda: safe_get_full_fp32_param(weight),
        ):
            with pytest.raises(UsageError, match="ended in the middle"):
                use()


def fail_at(patch: pytest.MonkeyPatch, call: str, number: int, fault: int = errno.EIO) -> None:
    """Only the ``number``-th call of ``os.call`` from now on fails."""
    real, left = getattr(os, call), [number]

    def failing(*args: object) -> object:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(fault, os.strerror(fault))
        return real(*args)

    patch.setattr(os, call, failing)


@pytest.mark.parametrize("number", [1, 2])  # the two shards written last are still in memory
@pytest.mark.parametrize("use", ["forward", "read"])
def test_parameters_that_could_not_be_read_are_not_shown_later(place, monkeypatch, number, use):
    with build_at(place) as engine:
        step(engine)
        expected = values(engine, use)
        real = storage.allocate
        monkeypatch.setattr(storage, "allocate", lambda flat: (real(flat), flat.fill_(math.nan)))
        with monkeypatch.context() as patch:
            fail_at(patch, "preadv", number)
            with pytest.raises(DiskError, match="reading"):
                values(engine, use)
        assert values(engine, use) == expected  # the disk works again: the values are there


def values(engine: zeroshard.Engine, use: str) -> list[float]:
    if use == "read":
        return [full.double().sum().item() for _, full in engine.iter_full_params()]
    with torch.no_grad():
        return [engine(torch.ones(2, 64, dtype=torch.bfloat16)).double().sum().item()]


# ---------------------------------------------------------------- a disk that is too small


NUMEL = 2 * (1024 * 1024 + 1024)


def too_small(
    place: Path, stage: int, free_nbytes_by_host: list[int] | None
) -> tuple[str, str, float]:
    """Two ranks want 16 (stage 3) or 14 bytes for each of 2.1 M parameters. No unit is ever made."""

    def unit(*_: object, **__: object) -> None:
        raise AssertionError("memory is made before the disk was asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_runtime, "Unit", unit)
        if free_nbytes_by_host is not None:
            host = dist.get_rank() % len(free_nbytes_by_host)
            patch.setattr(capacity_check, "host_number", lambda: host)
            patch.setattr(capacity_check, "free_below", lambda _: free_nbytes_by_host[host])
        return outcome(lambda: zeroshard.Engine(Net(1024, 2), config=config(place, stage)))


def check_too_small(results: list, place: Path, wanted: int, free_nbytes: int) -> None:
    for kind, text, seconds in results:
        assert kind == "DiskError"
        assert text == (
            f"{place} has too little space for the training state: the ranks of this host need "
            f"{wanted} bytes ({wanted / 1e9:.2f} GB) and {free_nbytes} ({free_nbytes / 1e9:.2f} "
            f"GB) are free, {wanted - free_nbytes} too few. Free space, name another nvme_path, "
            "store less on disk (max_in_cpu, or device 'cpu'), or use more hosts."
        )
        assert seconds < 20  # far less than a wait for the other rank


@pytest.mark.parametrize(("stage", "each_nbytes"), [(1, 14), (2, 14), (3, 16)])
def test_a_disk_that_cannot_hold_the_state_is_refused_before_memory_is_made(
    place, stage, each_nbytes
):
    if free(place) > DISK_NBYTES:
        pytest.skip("this user may not mount; the next test covers the numbers")
    results = run_ranks(too_small, 2, place, stage, None, timeout=40)
    check_too_small(results, place, each_nbytes * NUMEL, free(place))


@pytest.mark.parametrize("frees", [[1 << 20], [1 << 40, 1 << 20]], ids=["one host", "two hosts"])
def test_all_ranks_hear_of_one_hosts_small_disk(place, frees):
    results = run_ranks(too_small, 2, place, 3, frees, timeout=40)
    check_too_small(results, place, 16 * NUMEL // len(frees), 1 << 20)


def built_on_a_disk_that_shrinks(place: Path, number: int) -> tuple[str, str, float, int]:
    """Another process takes the disk space while rank 1 reserves it."""

    def body() -> None:
        with zeroshard.Engine(Net(), config=config(place)) as engine:
            step(engine)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            fail_at(patch, "posix_fallocate", number, errno.ENOSPC)
        found = outcome(body)
    return (*found, swap_files(place))


@pytest.mark.parametrize("number", [2, 9], ids=["for parameters", "for the optimizer"])
def test_space_that_goes_while_it_is_reserved_ends_the_run_on_all_ranks(place, number):
    results = run_ranks(built_on_a_disk_that_shrinks, 2, place, number, timeout=40)
    kind, text, seconds, files = results[1]
    assert kind == "DiskError"
    assert f"{place} has no space for the state that is to be stored there: " in text
    assert "are free (No space left on device (ENOSPC))." in text
    assert (files, seconds < 20) == (0, True)
    kind, text, seconds, files = results[0]
    assert kind == "RankLost"
    assert f"DiskError: {place} has no space" in text
    assert (files, seconds < 20) == (0, True)


# ---------------------------------------------------------------- a path that is none


def build_at(path: Path | str, **more) -> zeroshard.Engine:
    torch.manual_seed(0)
    return zeroshard.Engine(Net(), config=config(path, **more))


def test_a_directory_whose_parent_is_missing_is_refused(tmp_path):
    path = tmp_path / "no" / "swap"
    with pytest.raises(DiskError) as caught:
        build_at(path)
    assert str(caught.value) == (
        f"no swap file can be created in {path}: No such file or directory (ENOENT). Its parent "
        f"{path.parent} does not exist either. Give as nvme_path a directory on a local disk that "
        "this user may write to."
    )


def test_a_file_in_the_directorys_place_is_refused(tmp_path):
    path = tmp_path / "swap"
    path.write_text("mine")
    with pytest.raises(DiskError) as caught:
        build_at(path)
    assert str(caught.value) == (
        f"no swap file can be created in {path}: Not a directory (ENOTDIR). Give as nvme_path a "
        "directory on a local disk that this user may write to."
    )
    assert path.read_text() == "mine"


def test_a_read_only_disk_is_refused(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        place.chmod(0o500)  # root may write there, but root may mount
    try:
        with pytest.raises(DiskError) as caught:
            build_at(place)
        why = "Read-only file system (EROFS)" if mounted else "Permission denied (EACCES)"
        assert str(caught.value) == (
            f"no swap file can be created in {place}: {why}. Give as nvme_path a directory on a "
            "local disk that this user may write to."
        )
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def test_a_directory_is_made_if_only_its_last_part_is_missing(tmp_path):
    with build_at(tmp_path / "swap") as engine:
        step(engine)
        assert swap_files(tmp_path / "swap") == 1
    assert os.listdir(tmp_path / "swap") == []


def test_a_relative_path_starts_where_the_program_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with build_at("swap") as engine:
        monkeypatch.chdir("/")
        step(engine)
        assert swap_files(tmp_path / "swap") == 1


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with build_at("~/swap") as engine:
        step(engine)
        assert swap_files(tmp_path / "swap") == 1
    assert os.listdir(tmp_path) == ["swap"]


def test_a_directory_removed_during_the_run_is_not_missed(tmp_path):
    with build_at(tmp_path / "swap") as engine:
        expected = [step(engine) for _ in range(4)]
    with build_at(tmp_path / "swap") as engine:
        losses = [step(engine) for _ in range(2)]
        shutil.rmtree(tmp_path / "swap")
        losses += [step(engine) for _ in range(2)]
    assert losses == expected


def test_a_disk_filled_by_somebody_else_does_not_stop_the_run(place):
    with build_at(place) as engine:
        before = [step(engine) for _ in range(2)]
        with contextlib.suppress(OSError), open(place / "other", "wb") as other:
            for _ in range(2 * DISK_NBYTES >> 16):
                other.write(bytes(1 << 16))
        after = [step(engine) for _ in range(2)]
        (place / "other").unlink()
    assert after[-1] < before[-1]


# ---------------------------------------------------------------- the end of an engine


def test_an_error_of_the_program_before_a_step_gives_disk_and_memory_back(place):
    engine = build_at(place)
    step(engine)
    with pytest.raises(ZeroDivisionError), engine:
        backward(engine)
        raise ZeroDivisionError("bad sample")
    assert swap_files(place) == 0
    assert held_nbytes(engine) == 0


def test_an_engine_may_be_closed_twice(place):
    engine = build_at(place)
    step(engine)
    engine.close()
    engine.close()
    assert swap_files(place) == 0


def test_two_engines_swap_in_one_directory(place):
    with build_at(place) as alone:
        expected = [step(alone) for _ in range(3)]
    with build_at(place) as first, build_at(place) as second:
        losses = [(step(first), step(second)) for _ in range(2)]
        first.close()
        losses.append((expected[2], step(second)))
    assert losses == [(loss, loss) for loss in expected]


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_is_forgotten_gives_the_disk_back(place, world):
    assert run_ranks(forgotten, world, place, timeout=40) == [0] * world


def forgotten(place: Path) -> int:
    engine = build_at(place)
    step(engine)
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    for thread in threading.enumerate():  # the file may be closed by the last of its own threads
        if thread.name.startswith("zeroshard-disk"):
            thread.join(20)
    return swap_files(place)


# ---------------------------------------------------------------- ranks that disagree


def with_other_placement(place: Path, other: dict) -> tuple[str, str, float]:
    keys = {"optimizer": other} if dist.get_rank() == 1 else {}
    return outcome(lambda: zeroshard.Engine(Net(), config=config(place, **keys)))


@pytest.mark.parametrize(
    ("key", "mine", "theirs"),
    [("device", '"nvme"', '"cpu"'), ("ratio", "1.0", "0.5"), ("max_in_cpu", "0", "64")],
)
def test_another_placement_on_one_rank_is_an_error_before_the_first_byte(place, key, mine, theirs):
    other = {key: json.loads(theirs)}
    results = run_ranks(with_other_placement, 2, place, other, timeout=40)
    for kind, text, seconds in results:
        assert kind == "RankMismatch"
        assert f"offload_optimizer.{key} = {mine} (rank 0" in text
        assert f" vs {theirs} (rank 1" in text
        assert seconds < 5
    assert results[0][1] == results[1][1]
