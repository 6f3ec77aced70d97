"""How much memory may this process use?

Reads cgroup v2, v1 and both at once (hybrid), and ``/proc/meminfo``. Which version holds the memory
controller is decided by which file exists: in a hybrid the v2 line is there without a controller, and
in a container the visible root already is the container's cgroup. Every function takes the file
system's root, so that it can be tested on a folder of recorded files. The launcher asks too, before
torch is imported: this file must not import it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

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
class HostLimits:
    """Host memory as this process sees it, in bytes; None where the system does not say."""

    host_total_nbytes: int | None
    host_free_nbytes: int | None  # MemAvailable
    cgroup: CgroupLimit | None

    @property
    def free_nbytes(self) -> int | None:
        """What can still be allocated: the host's free memory, or the cgroup's rest if smaller."""
        known = [self.host_free_nbytes, self.cgroup.free_nbytes if self.cgroup else None]
        return min((n for n in known if n is not None), default=None)

    @property
    def is_cgroup_tighter(self) -> bool:
        """Does the cgroup leave less than the host has?"""
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
    """In GiB with one digit.

    >>> gib(3 << 29)
    '1.5 GiB'
    """
    return f"{nbytes / (1 << 30):.1f} GiB"


def host_limits(root: Path = ROOT) -> HostLimits:
    """Free memory of the host and the tightest cgroup limit from this process's cgroup upwards."""
    info = read_table(root / "proc/meminfo")
    limits = [limit for folder in memory_folders(root) if (limit := _limit(folder)) is not None]
    return HostLimits(
        host_total_nbytes=kib(info, "MemTotal:"),
        host_free_nbytes=kib(info, "MemAvailable:"),
        cgroup=min(limits, key=lambda limit: limit.free_nbytes, default=None),
    )


def memory_folders(root: Path) -> Iterator[Path]:
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


def read_table(path: Path) -> dict[str, int]:
    """Lines ``name number ...`` of a kernel file; empty if it cannot be read."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def kib(table: dict[str, int], name: str) -> int | None:
    """A row in KiB as bytes; None if there is no such row."""
    return table[name] * 1024 if name in table else None


def _limit(folder: Path) -> CgroupLimit | None:
    """The limit set on one cgroup, of whichever version."""
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
