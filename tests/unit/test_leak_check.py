"""Everything that a test leaves behind is found, and restored if possible."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed as dist
from zeroshard_testing import leak_check


@pytest.fixture
def before():
    snapshot = leak_check.snapshot()
    yield snapshot
    leak_check.restore(snapshot)


def _leaks(before):
    return leak_check.leaks(before, leak_check.snapshot())


def test_a_clean_test_leaves_nothing(before):
    torch.ones(3).sum()
    assert _leaks(before) == []


def test_variables_are_found_and_put_back(before, monkeypatch):
    name = "ZEROSHARD_POLICE_TEST"
    os.environ[name] = "1"
    assert _leaks(before) == [f"environment variable {name} is '1', was None"]
    leak_check.restore(before)
    assert name not in os.environ


def test_a_running_thread_is_found(before):
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="late")
    thread.start()
    assert _leaks(before) == ["thread 'late' still runs"]
    release.set()
    thread.join()
    assert _leaks(before) == []


def test_a_thread_that_is_about_to_end_has_time_to(before):
    thread = threading.Thread(target=threading.Event().wait, args=(0.05,))
    thread.start()
    assert leak_check.leaks(before, leak_check.snapshot(), grace_s=5.0) == []


def test_a_thread_that_is_about_to_end_may_close_its_file(before, tmp_path):
    file = (tmp_path / "kept.txt").open("w")

    def close_late():
        threading.Event().wait(0.05)
        file.close()

    threading.Thread(target=close_late).start()
    assert leak_check.leaks(before, leak_check.snapshot(), grace_s=5.0) == []


def test_an_open_file_is_found(before, tmp_path):
    file = (tmp_path / "kept.txt").open("w")
    assert _leaks(before) == [f"{tmp_path / 'kept.txt'} is open 1 time(s) more than before"]
    file.close()
    assert _leaks(before) == []


def test_the_default_dtype_is_found_and_put_back(before):
    torch.set_default_dtype(torch.float64)
    assert _leaks(before) == ["torch.get_default_dtype() is torch.float64, was torch.float32"]
    leak_check.restore(before)
    assert torch.get_default_dtype() == torch.float32


def test_switches_that_did_not_move_are_not_set(before, monkeypatch):
    """The setter of deterministic algorithms imports torch's compiler: 6 s in every rank."""
    called = []
    switches = dict.fromkeys(leak_check._SWITCHES, called.append)
    monkeypatch.setattr(leak_check, "_SWITCHES", switches)
    leak_check.restore(before)
    assert called == []


def test_a_process_group_is_found_and_ended(before, tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert "a process group is still initialised" in _leaks(before)
    leak_check.restore(before)
    assert not dist.is_initialized()
