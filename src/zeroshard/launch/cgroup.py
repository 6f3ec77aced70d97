"""How much memory may this process use, and has the kernel killed anything for want of it?

Reads cgroup v2, v1 and both at once (hybrid), ``/proc/meminfo`` and ``/proc/vmstat``. Which version
holds the memory controller is decided by which file exists: in a hybrid the v2 line is there
without a controller, and in a container the visible root already is the container's cgroup. Every
function takes the file system's root, so that it can be tested on a folder of recorded files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 writes "no limit" as the largest page-aligned number.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The tightest memory limit above this process, all in bytes."""

    limit_nbytes: int
    used_nbytes: int  # without the file cache that the kernel gives up first
    folder: str

    @property
    def free_nbytes(self) -> int:
        return max(0, self.limit_nbytes - self.used_nbytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """Host memory as this process sees it, in bytes; None where the system does not say."""

    host_total_nbytes: int | None
    host_free_nbytes: int | None  # MemAvailable
    cgroup: CgroupLimit | None

    @property
    def free_nbytes(self) -> int | None:
        """What can still be allocated: the host's free memory, or the cgroup's rest if smaller."""
        known = [self.host_free_nbytes, self.cgroup.free_nbytes if self.cgroup else None]
        return min((n for n in known if n is not None), default=None)


@dataclass(frozen=True, slots=True)
class OomCounters:
    """Processes that the kernel killed for want of memory; only differences mean something."""

    cgroup: int | None
    host: int | None

    def since(self, earlier: OomCounters) -> OomCounters:
        return OomCounters(_minus(self.cgroup, earlier.cgroup), _minus(self.host, earlier.host))


def read_memory(root: Path = Path("/")) -> Memory:
    """Free memory of the host and the tightest cgroup limit from this process's cgroup upwards."""
    info = _table(root / "proc/meminfo")
    limits = [limit for folder in _memory_folders(root) if (limit := _limit(folder)) is not None]
    return Memory(
        host_total_nbytes=_kib(info, "MemTotal:"),
        host_free_nbytes=_kib(info, "MemAvailable:"),
        cgroup=min(limits, key=lambda limit: limit.free_nbytes, default=None),
    )


def read_oom_counters(root: Path = Path("/")) -> OomCounters:
    """``oom_kill`` of our cgroup (``memory.events``; v1: ``memory.oom_control``) and the host."""
    cgroup = None
    for folder in _memory_folders(root):
        for name in ("memory.events", "memory.oom_control"):
            cgroup = _table(folder / name).get("oom_kill")
            if cgroup is not None:
                break
        if cgroup is not None:
            break
    return OomCounters(cgroup, _table(root / "proc/vmstat").get("oom_kill"))


def read_rss_nbytes(pid: int, root: Path = Path("/")) -> int | None:
    """Resident memory of a living process in bytes; None once it is gone."""
    return _kib(_table(root / f"proc/{pid}/status"), "VmRSS:")


def read_shm_nbytes() -> int | None:
    """Size of ``/dev/shm`` in bytes; None where there is none."""
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return None


def _memory_folders(root: Path) -> Iterator[Path]:
    """cgroup folders that may hold memory files, from our own one up to the visible root."""
    mount = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [mount, mount / "unified"]
        elif "memory" in controllers.split(","):
            bases = [mount / "memory", mount / controllers]
        else:
            continue
        # seen from a cgroup namespace, the path of a process outside of it starts with ".."
        names = [name for name in path.split("/") if name not in ("", "..")]
        for base in bases:
            folder = base.joinpath(*names)
            while folder != base:
                if folder.is_dir():
                    yield folder
                folder = folder.parent
            yield base


def _limit(folder: Path) -> CgroupLimit | None:
    """The limit set on one cgroup, of whichever version."""
    versions = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for limit_file, usage_file, cache in versions:
        limit, usage = _text(folder / limit_file).strip(), _text(folder / usage_file).strip()
        if limit.isdigit() and usage.isdigit() and int(limit) < _UNLIMITED:
            used = int(usage) - _table(folder / "memory.stat").get(cache, 0)
            return CgroupLimit(int(limit), max(0, used), str(folder))
    return None


def _table(path: Path) -> dict[str, int]:
    """Lines ``name number ...`` of a kernel file; empty if it cannot be read."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _kib(table: dict[str, int], name: str) -> int | None:
    return table[name] * 1024 if name in table else None


def _minus(now: int | None, before: int | None) -> int | None:
    return None if now is None or before is None else now - before
