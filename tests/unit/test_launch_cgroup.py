"""Kill counters, read from recorded folders of each cgroup version, and the launcher's memory check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.errors import LaunchError
from zeroshard.launch.resources import check_memory, parse_nbytes
from zeroshard.memory.host_limits import (
    CgroupLimit,
    HostLimits,
    OomCounters,
    is_stopped,
    read_oom_counters,
    read_rss_nbytes,
)

FIXTURES = Path(__file__).parent / "fixtures"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("folder", "counters"),
    [
        (
            "cgroup_v2",
            OomCounters(2, 4),
        ),  # of this process's cgroup, not of the parent's other children
        ("cgroup_v2_container", OomCounters(5, 1)),
        ("cgroup_v1", OomCounters(3, None)),
        ("cgroup_hybrid", OomCounters(6, 0)),
        ("cgroup_none", OomCounters(None, None)),
    ],
)
def test_kill_counters_are_those_of_the_own_cgroup(folder, counters):
    assert read_oom_counters(FIXTURES / folder) == counters


def test_counters_are_compared_only_where_both_are_known():
    later, earlier = OomCounters(5, None), OomCounters(3, 1)
    assert later.since(earlier) == OomCounters(2, None)


def test_resident_memory_of_a_process():
    assert read_rss_nbytes(4321, FIXTURES / "cgroup_none") == 2 << 20


def test_resident_memory_of_a_process_that_is_gone():
    assert read_rss_nbytes(1, FIXTURES / "cgroup_none") is None


ROOMY = HostLimits(64 * GIB, 48 * GIB, CgroupLimit(16 * GIB, 4 * GIB, "/x"))


def check(memory=ROOMY, *, num_local=2, expected=None, shm=8 * GIB):
    return check_memory(memory, num_local=num_local, expected_nbytes=expected, shm_nbytes=shm)


def test_enough_memory_is_silence():
    assert check(expected=6 * GIB) == ()


def test_expected_memory_that_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(LaunchError) as caught:
        check(expected=7 * GIB)
    assert str(caught.value).splitlines() == [
        "2 ranks x 7.0 GiB = 14.0 GiB of memory are expected, but only 12.0 GiB are free here "
        "(cgroup limit 16.0 GiB, 4.0 GiB in use; host MemAvailable 48.0 GiB).",
        "The kernel would kill a rank during the run. Use fewer ranks per node, a higher ZeRO "
        "stage, a larger memory limit, or correct --expect-memory-per-rank.",
    ]


def test_hardly_any_memory_is_a_warning():
    assert check(HostLimits(GIB, GIB // 2, None), num_local=3) == (
        "only 0.5 GiB of memory are free for 3 ranks (host MemAvailable 0.5 GiB); "
        "importing torch alone takes about 0.25 GiB each.",
    )


def test_the_shared_memory_of_a_default_container_is_a_warning():
    assert check(shm=64 << 20) == (
        "/dev/shm has only 64 MiB. When it is full, data-loader workers and NCCL end with SIGBUS. "
        "docker run --shm-size=8g (or --ipc=host) makes it larger.",
    )


def test_unknown_memory_is_not_judged():
    assert check(HostLimits(None, None, None), expected=1 << 50, shm=None) == ()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("12GB", 12 * 10**9),
        ("12GiB", 12 * GIB),
        ("1.5g", 15 * 10**8),
        ("4096", 4096),
        ("1 TiB", 1 << 40),
    ],
)
def test_sizes_are_read(text, nbytes):
    assert parse_nbytes(text, "--x") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "12 apples", "-1GB", "3iB"])
def test_what_is_not_a_size_is_refused(text):
    with pytest.raises(LaunchError, match="is not a size; write for example 12GB or 12GiB"):
        parse_nbytes(text, "--x")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_a_signal_stopped_is_seen():
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            assert not is_stopped(process.pid)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # returns when the process has stopped
            assert is_stopped(process.pid)
        finally:
            process.kill()
    assert not is_stopped(process.pid)
