"""The memory limit of a host is read correctly, and a plan that exceeds it is refused with numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zeroshard.errors import HostMemoryError
from zeroshard.memory.host_limits import CgroupLimit, HostLimits, host_limits
from zeroshard.offload.capacity_check import check_host

FIXTURES = Path(__file__).parent / "fixtures"
GIB = 1 << 30


def host(root: Path, files: dict[str, str]) -> Path:
    """A folder that looks like ``/`` of a machine with 64 GiB, 48 of them free."""
    meminfo = {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n"}
    for name, text in (meminfo | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup(folder: str, limit: int | str, used: int, *, cache: int = 0) -> dict[str, str]:
    """Files of one v2 cgroup; sizes in GiB."""
    base = f"sys/fs/cgroup/{folder}"
    return {
        f"{base}/memory.max": f"{limit * GIB if isinstance(limit, int) else limit}\n",
        f"{base}/memory.current": f"{used * GIB}\n",
        f"{base}/memory.stat": f"anon 5\ninactive_file {cache * GIB}\n",
    }


def own(path: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"0::{path}\n"}


# Reading the limits


@pytest.mark.parametrize(
    ("folder", "limit_gib", "used_gib"),
    [
        ("cgroup_v2", 240, 100),  # the limit sits on the parent; file cache does not count
        ("cgroup_v2_container", 8, 1),  # the visible root is the container's cgroup
        ("cgroup_v1", 16, 4),
        ("cgroup_hybrid", 4, 1),  # the v2 line has no memory controller there
    ],
)
def test_the_tightest_limit_is_found(folder: str, limit_gib: int, used_gib: int) -> None:
    limit = host_limits(FIXTURES / folder).cgroup
    assert limit is not None
    assert (limit.limit_nbytes, limit.used_nbytes) == (limit_gib * GIB, used_gib * GIB)


@pytest.mark.parametrize("folder", ["cgroup_v1_unlimited", "cgroup_none"])
def test_no_limit_is_no_limit(folder: str) -> None:
    assert host_limits(FIXTURES / folder).cgroup is None


@pytest.mark.parametrize(
    ("folder", "free_gib"),
    [("cgroup_v2", 140), ("cgroup_v1", 12), ("cgroup_hybrid", 2), ("cgroup_none", 0.5)],
)
def test_free_memory_is_the_smaller_of_host_and_cgroup(folder: str, free_gib: float) -> None:
    assert host_limits(FIXTURES / folder).free_nbytes == free_gib * GIB


def test_of_nested_limits_the_one_that_leaves_least_counts(tmp_path: Path) -> None:
    """The larger limit of a parent may be nearly used up by others."""
    files = own("/a/b") | cgroup("a", 20, 19) | cgroup("a/b", 8, 1)
    assert host_limits(host(tmp_path, files)).free_nbytes == GIB


def test_the_word_max_is_no_limit_but_a_parents_number_is(tmp_path: Path) -> None:
    files = own("/a/b/c") | cgroup("a", 9, 2) | cgroup("a/b", "max", 2) | cgroup("a/b/c", "max", 1)
    assert host_limits(host(tmp_path, files)).free_nbytes == 7 * GIB


def test_file_cache_that_the_kernel_gives_up_is_free(tmp_path: Path) -> None:
    files = own("/a") | cgroup("a", 9, 8, cache=6)
    assert host_limits(host(tmp_path, files)).free_nbytes == 7 * GIB


@pytest.mark.parametrize("missing", ["memory.max", "memory.current"])
def test_half_a_cgroup_is_no_limit(tmp_path: Path, missing: str) -> None:
    root = host(tmp_path, own("/a") | cgroup("a", 2, 1))
    (root / "sys/fs/cgroup/a" / missing).unlink()
    assert host_limits(root).cgroup is None


def test_a_limit_without_statistics_counts_all_that_is_used(tmp_path: Path) -> None:
    root = host(tmp_path, own("/a") | cgroup("a", 9, 8, cache=6))
    (root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert host_limits(root).free_nbytes == GIB


def test_a_cgroup_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    assert host_limits(host(tmp_path, own("/a") | cgroup("a", 2, 3))).free_nbytes == 0


def test_a_path_outside_of_the_namespace_leads_to_what_is_visible(tmp_path: Path) -> None:
    assert host_limits(host(tmp_path, own("/../../b") | cgroup(".", 6, 1))).free_nbytes == 5 * GIB


def test_a_system_that_says_nothing_has_no_limits(tmp_path: Path) -> None:
    assert host_limits(tmp_path) == HostLimits(None, None, None)


def test_limits_are_read_without_torch() -> None:
    """The launcher asks before any rank exists."""
    code = "import sys, zeroshard.memory.host_limits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# The check

TIGHT_CGROUP = HostLimits(64 * GIB, 48 * GIB, CgroupLimit(16 * GIB, 4 * GIB, "/sys/fs/cgroup/job"))
TIGHT_HOST = HostLimits(64 * GIB, 10 * GIB, CgroupLimit(32 * GIB, 4 * GIB, "/sys/fs/cgroup/job"))


def refusal(planned: list[int], limits: HostLimits) -> list[str]:
    with pytest.raises(HostMemoryError) as caught:
        check_host(planned, limits)
    return str(caught.value).splitlines()


def test_a_plan_that_fills_the_memory_exactly_passes() -> None:
    check_host([5 * GIB, 7 * GIB], TIGHT_CGROUP)


def test_ranks_that_would_fit_alone_are_judged_together() -> None:
    check_host([7 * GIB], TIGHT_CGROUP)
    refusal([7 * GIB, 7 * GIB], TIGHT_CGROUP)


def test_unknown_limits_are_not_judged() -> None:
    check_host([1 << 60], HostLimits(None, None, None))


def test_a_refusal_shows_every_rank_the_sum_and_what_helps() -> None:
    assert refusal([20 * GIB, 13 * GIB + GIB // 2], TIGHT_CGROUP) == [
        "The host memory that this run plans does not fit: 33.50 GiB are planned, 12.00 GiB are "
        "free. The kernel would kill a rank during the run.",
        "  local rank       planned",
        "           0     20.00 GiB",
        "           1     13.50 GiB",
        "         sum     33.50 GiB",
        "        free     12.00 GiB  the limit is that of the cgroup /sys/fs/cgroup/job (cgroup "
        "limit 16.0 GiB, 4.0 GiB in use; host MemAvailable 48.0 GiB)",
        "Each of these helps:",
        "  - at least 3 times as many hosts of this kind: each host then stores a smaller part",
        '  - zero_optimization.offload_optimizer.device "nvme": the state is stored on disk (with '
        "max_in_cpu, a part of it)",
        "  - a smaller zero_optimization.offload_optimizer.ratio: on a GPU, more of the state "
        "stays on the device",
        "  - bf16.bf16_master_weights_and_grads with bf16.bf16_optimizer_states: masters and "
        "moments have a 16-bit dtype, at most half the bytes",
    ]


def test_a_refusal_says_when_it_is_the_host_that_binds() -> None:
    assert refusal([11 * GIB], TIGHT_HOST)[4] == (
        "        free     10.00 GiB  the limit is the host's memory (cgroup limit 32.0 GiB, 4.0 "
        "GiB in use; host MemAvailable 10.0 GiB)"
    )


def test_no_number_of_hosts_is_named_where_nothing_is_free() -> None:
    lines = refusal([GIB], HostLimits(GIB, 0, None))
    assert "  - more hosts of this kind: each host then stores a smaller part" in lines
