"""Reads how many processes the kernel killed for lack of memory, how much memory processes hold, and
whether a signal has stopped them.

Sources are cgroup v2 and v1, ``/proc/vmstat`` and ``/proc/PID/status``. The limits of memory are read in
:mod:`zeroshard.memory.host_limits`, which engines use as well.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from zeroshard.memory.host_limits import ROOT, cgroup_folders, kib, read_table


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
