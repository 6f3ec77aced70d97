"""Reads how much memory this process may use, how much processes hold, and how many the kernel killed.

Sources are cgroup v2, v1, both at once (hybrid), and ``/proc``. The version that holds the memory
controller is found by which file exists: in a hybrid the v2 line is present without a controller, and in
a container the visible root is already the container's cgroup. Every function takes the root of the file
system, so it can be tested on a folder of recorded files. The launcher uses this file before torch is
imported, so it must not import torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

# cgroup v1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The tightest memory limit of this process's cgroups, in bytes."""

    limit_nbytes: int
    used_nbytes: int  # without the file cache, which the kernel reclaims first
    folder: str

    @property
    def free_nbytes(self) -> int:
        return max(0, self.limit_nbytes - self.used_nbytes)


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Host memory as this process sees it, in bytes; None where the system does not report it."""

    host_total_nbytes: int | None
    host_free_nbytes: int | None  # MemAvailable
    cgroup: CgroupLimit | None

    @property
    def free_nbytes(self) -> int | None:
        """Bytes that can still be allocated: free memory of the host, or of the cgroup if less."""
        known = [self.host_free_nbytes, self.cgroup.free_nbytes if self.cgroup else None]
        return min((n for n in known if n is not None), default=None)

    @property
    def is_cgroup_tighter(self) -> bool:
        """Whether the cgroup leaves less than the host has."""
        return self.cgroup is not None and self.cgroup.free_nbytes == self.free_nbytes

    def in_words(self) -> str:
        """Both limits in GiB; empty if nothing is known."""
        parts: list[str] = []
        if (limit := self.cgroup) is not None:
            used, whole = gib(limit.used_nbytes), gib(limit.limit_nbytes)
            parts.append(f"cgroup limit {whole}, {used} in use")
        if self.host_free_nbytes is not None:
            parts.append(f"host MemAvailable {gib(self.host_free_nbytes)}")
        return "; ".join(parts)


def gib(nbytes: int) -> str:
    """Bytes in GiB with one decimal.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{nbytes / (1 << 30):.1f} GiB"


def host_limits(root: Path = ROOT) -> HostLimits:
    """Free memory of the host and the tightest cgroup limit from this process's cgroup upwards."""
    info = read_table(root / "proc/meminfo")
    limits = [limit for folder in cgroup_folders(root) if (limit := _limit(folder)) is not None]
    return HostLimits(
        host_total_nbytes=kib(info, "MemTotal:"),
        host_free_nbytes=kib(info, "MemAvailable:"),
        cgroup=min(limits, key=lambda limit: limit.free_nbytes, default=None),
    )


def cgroup_folders(root: Path, controller: str = "memory") -> Iterator[Path]:
    """cgroup folders that may hold a controller's files, from this process's cgroup up to the visible
    root."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            bases = [mount / controller, mount / controllers]
        else:
            continue
        # In a cgroup namespace, the path of a process outside of it starts with "..".
        names = [name for name in path.split("/") if name not in ("", "..")]
        for base in bases:
            folder = base.joinpath(*names)
            while folder != base:
                if folder.is_dir():
                    yield folder
                folder = folder.parent
            yield base


def read_table(path: Path) -> dict[str, int]:
    """Lines ``name number ...`` of a kernel file as a dict; empty if the file cannot be read."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def kib(table: dict[str, int], name: str) -> int | None:
    """The row ``name``, given in KiB, in bytes; None if it does not exist."""
    return table[name] * 1024 if name in table else None


def _limit(folder: Path) -> CgroupLimit | None:
    """The memory limit of one cgroup of either version, None if there is none."""
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit_file, usage_file, cache in versions:
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            used = int(usage) - read_table(folder / "memory.stat").get(cache, 0)
            return CgroupLimit(int(limit), max(0, used), str(folder))
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class OomCounters:
    """Processes that the kernel killed for lack of memory, since boot or since the cgroup was made.

    Only differences of two readings have a meaning. None: the system does not count them.
    """

    cgroup: int | None
    host: int | None

    def since(self, earlier: OomCounters) -> OomCounters:
        return OomCounters(_minus(self.cgroup, earlier.cgroup), _minus(self.host, earlier.host))


def read_oom_counters(root: Path = ROOT) -> OomCounters:
    """``oom_kill`` of this cgroup (``memory.events``; v1: ``memory.oom_control``) and of the host."""
    cgroup = None
    for folder in cgroup_folders(root):
        for name in ("memory.events", "memory.oom_control"):
            cgroup = read_table(folder / name).get("oom_kill")
            if cgroup is not None:
                break
        if cgroup is not None:
            break
    return OomCounters(cgroup, read_table(root / "proc/vmstat").get("oom_kill"))


def read_rss_nbytes(pid: int, root: Path = ROOT) -> int | None:
    """Resident memory of a process in bytes; None if it has ended."""
    return kib(read_table(root / f"proc/{pid}/status"), "VmRSS:")


def read_peak_rss_nbytes(pid: int, root: Path = ROOT) -> int | None:
    """The most resident memory that a process had so far, in bytes; None: the system does not say."""
    return kib(read_table(root / f"proc/{pid}/status"), "VmHWM:")


def is_stopped(pid: int, root: Path = ROOT) -> bool:
    """Whether a signal (SIGSTOP) has stopped a process; False if it runs, has ended, or is traced."""
    try:
        status = (root / f"proc/{pid}/status").read_text()
    except OSError:
        return False
    return any(line.split()[:2] == ["State:", "T"] for line in status.splitlines())


def read_shm_nbytes() -> int | None:
    """Size of ``/dev/shm`` in bytes; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
