"""Reads what a machine is, before anything runs on it: memory, cores, limits, disks, network, variables.

Every function that reads files takes the root of the file system, so it can be tested on recorded files.
Nothing here imports torch, which may be missing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from zeroshard.core.files import free_nbytes, turn_direct
from zeroshard.core.filesystems import filesystem_of
from zeroshard.memory.host_limits import ROOT, HostLimits, cgroup_folders, host_limits
from zeroshard.run.variables import variables_of_behaviour

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "deepspeed", "safetensors")
"""Packages whose versions are told. A missing one is no fault."""

_NCCL = tuple(f"nvidia-nccl-cu{n}" for n in (11, 12, 13))
"""Packages with the NCCL that torch loads; other builds of torch contain it."""

OLDEST_REGISTERING_NCCL = (2, 19)
"""It has ``ncclCommRegister``."""

_LIMITS = (
    ("-l", resource.RLIMIT_MEMLOCK, 1024),
    ("-n", resource.RLIMIT_NOFILE, 1),
    ("-u", resource.RLIMIT_NPROC, 1),
)


@dataclass(frozen=True)
class Disk:
    """The place for offloaded state. ``direct``: a page was written and read past the page cache."""

    path: str
    filesystem: str
    free_nbytes: int
    direct: bool


@dataclass(frozen=True)
class Facts:
    """What is known of this machine. None: the system does not report it.

    ``cores``: that this process may run on; ``quota``: cores' worth of time that the cgroup gives.
    ``limits``: soft limits by option of ``ulimit``, -1 without a limit; "-l" in KiB. ``disk``: None if it
    cannot be used, for the reason ``disk_trouble``. ``variables``: of the environment, those that change
    behaviour.
    """

    host: str
    python: str
    versions: Mapping[str, str]
    memory: HostLimits
    shm_nbytes: int | None
    shm_free_nbytes: int | None
    cores: int
    quota: float | None
    limits: Mapping[str, int]
    disk: Disk | None
    interfaces: Sequence[str]
    iommu: bool
    ranks: int
    disk_trouble: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable_cores(self) -> float:
        """Cores' worth of time for all ranks together."""
        return min(self.cores, self.quota or self.cores)


def gather(
    ranks: int,
    disk: Disk | None,
    environ: Mapping[str, str],
    root: Path = ROOT,
    *,
    disk_trouble: str = "",
) -> Facts:
    """The facts of this machine, for ``ranks`` ranks on it and state offloaded to ``disk``."""
    try:
        shm = shutil.disk_usage(root / "dev/shm")
    except OSError:
        shm = None
    return Facts(
        host=platform.node(),
        python=platform.python_version(),
        versions=_versions(),
        memory=host_limits(root),
        shm_nbytes=shm.total if shm else None,
        shm_free_nbytes=shm.free if shm else None,
        cores=len(os.sched_getaffinity(0)),
        quota=cpu_quota(root),
        limits={option: _limit(kind, unit) for option, kind, unit in _LIMITS},
        disk=disk,
        disk_trouble=disk_trouble,
        interfaces=_interfaces(root),
        iommu=_has_entries(root / "sys/class/iommu"),
        ranks=ranks,
        variables=variables_of_behaviour(environ),
    )


def cpu_quota(root: Path = ROOT) -> float | None:
    """Cores' worth of time that the tightest cgroup gives this process; None without a limit.

    cgroup v2 has ``cpu.max`` ("200000 100000"), v1 two files.
    """
    found = []
    for folder in cgroup_folders(root, "cpu"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            if quota != "max":
                found.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            quota_us = int((folder / "cpu.cfs_quota_us").read_text())
            if quota_us > 0:
                found.append(quota_us / int((folder / "cpu.cfs_period_us").read_text()))
    return min(found, default=None)


def registered_memory(versions: Mapping[str, str], variables: Mapping[str, str]) -> str:
    """Whether the key ``registered_memory`` can have an effect, as far as versions and settings tell."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in variables.get(name, ""):
            return f"plain: {name} lets segments grow, and registered memory needs segments that do not"
    numbers = re.findall(r"\d+", versions.get("NCCL", ""))[:2]
    if numbers and tuple(map(int, numbers)) < OLDEST_REGISTERING_NCCL:
        return f"plain: NCCL {versions['NCCL']} registers no memory, 2.19 does"
    return 'plain, or registered with "registered_memory": true and expandable_segments:False'


def disk_of(path: Path) -> Disk | None:
    """The file system of a folder; None if nothing can be written there. May hang on a dead mount."""
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".zeroshard-") as file:
            mounts = Path("/proc/self/mounts").read_text()
            direct = turn_direct(file.fileno())
            return Disk(str(path), filesystem_of(path, mounts), free_nbytes(path), direct)
    except OSError:
        return None


def _limit(kind: int, unit: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft // unit


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if spec := importlib.util.find_spec("torch"):  # does not import it
        found |= _built_with(Path(spec.origin or "").with_name("version.py"))
    for name in _NCCL:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["NCCL"] = metadata.version(name)
    return found


def _built_with(version_file: Path) -> dict[str, str]:
    """The versions of CUDA and ROCm that torch was built for. ``version_file``: ``torch/version.py``."""
    with contextlib.suppress(OSError):
        lines = re.findall(
            r"^(cuda|hip)\b[^=\n]*= '([^']+)'", version_file.read_text(), re.MULTILINE
        )
        return {{"cuda": "CUDA", "hip": "ROCm"}[name]: version for name, version in lines}
    return {}


def _interfaces(root: Path) -> list[str]:
    """Network interfaces that are up, without the loopback."""
    found = []
    folder = root / "sys/class/net"
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if name != "lo" and (folder / name / "operstate").read_text().strip() != "down":
                found.append(name)
    return found


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
