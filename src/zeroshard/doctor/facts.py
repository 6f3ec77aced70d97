"""Reads what a machine is: memory, cores, limits, disks, network, variables, and how probes end.

Every function that reads files takes the root of the file system, so it can be tested on recorded files.
Nothing here imports torch, which may be missing.

A small program (a *probe*) may hang: on a GPU, a network or a dead mount. Each is in a session of its
own, so that its children end with it. One that does not answer is a result, not a fault of the doctor.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal

from zeroshard.core.files import filesystem_of, free_nbytes, turn_direct
from zeroshard.memory.host_limits import ROOT, HostLimits, cgroup_folders, host_limits
from zeroshard.run.run_folder import variables_of_behaviour

PACKAGES = ("torch", "triton", "transformers", "accelerate", "peft", "deepspeed", "safetensors")
"""Packages whose versions are told. A missing one is no fault."""

_NCCL = tuple(f"nvidia-nccl-cu{n}" for n in (11, 12, 13))
"""Packages with the NCCL that torch loads; other builds of torch contain it."""

OLDEST_REGISTERING_NCCL = (2, 19)
"""It has ``ncclCommRegister``."""

Kind = Literal["ok", "hang", "wrong", "failed", "absent", "untried"]

_END_S = 5.0  # that a killed process may take to end

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


@dataclass(frozen=True)
class ProbeOutcome:
    """How a probe ended. ``text``: in words. ``found``: what it printed as JSON.

    "wrong": the values of a collective were not the right ones. "absent": the program is not installed.
    "untried": there was no time left for it.
    """

    kind: Kind
    text: str
    found: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""


def probe(command: Sequence[str], *, limit_s: float, environ: Mapping[str, str]) -> ProbeOutcome:
    """Run a program until it ends or time is up."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        # A signal that came while the process is made would leave it behind: nobody has it yet.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        restore = partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=dict(environ),
                preexec_fn=restore,  # noqa: PLW1509 - the doctor has one thread
            )
        except OSError as error:
            restore()
            if not isinstance(error, FileNotFoundError):
                raise
            return ProbeOutcome("absent", f"{error.filename} is not installed")
        try:
            restore()
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return ProbeOutcome("hang", f"no answer in {limit_s:.0f} s", output=_read(out))
        finally:  # also if a signal ends this process: the command makes an exception of it
            _kill(process)
        if code:
            return ProbeOutcome(
                "failed", _last_line(_read(err)) or f"exit code {code}", output=_read(out)
            )
        return ProbeOutcome("ok", "ok", output=_read(out))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the whole session. A process that waits in the kernel may stay; it is not waited for."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def collectives(
    ranks: int, backend: str, *, limit_s: float, environ: Mapping[str, str], wrong_rank: int = -1
) -> ProbeOutcome:
    """Exchange tensors between ``ranks`` new processes and check the values.

    ``wrong_rank`` sends other values than it should, for tests.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-") as folder:
        words = [str(ranks), f"{folder}/store", backend, str(wrong_rank)]
        outcome = probe(
            [sys.executable, "-m", "zeroshard.doctor.exchange", *words],
            limit_s=limit_s,
            environ={**environ, "OMP_NUM_THREADS": "1"},
        )
    if outcome.kind != "ok":
        return outcome
    try:
        found = json.loads(outcome.output.splitlines()[-1])
    except (ValueError, IndexError):
        return ProbeOutcome("failed", "its output cannot be read", output=outcome.output)
    if found["wrong"]:
        return ProbeOutcome("wrong", f"wrong values in {', '.join(found['wrong'])}", found)
    return ProbeOutcome("ok", "values ok", found)


def listed_gpus(
    *, limit_s: float, environ: Mapping[str, str]
) -> tuple[ProbeOutcome, list[dict[str, str]]]:
    """The GPUs that ``nvidia-smi`` lists: name, memory in MiB and driver."""
    fields = ("name", "memory.total", "driver_version")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    path = environ.get("PATH", os.defpath)
    program = next(
        (f"{d}/nvidia-smi" for d in path.split(":") if os.access(f"{d}/nvidia-smi", os.X_OK)), None
    )
    if program is None:
        return ProbeOutcome("absent", "nvidia-smi is not installed"), []
    outcome = probe([program, *command[1:]], limit_s=limit_s, environ=environ)
    if outcome.kind != "ok":
        return outcome, []
    rows = [
        [cell.strip() for cell in line.split(",")] for line in outcome.output.splitlines() if line
    ]
    if any(len(row) != len(fields) or not row[1].isdigit() for row in rows):
        return ProbeOutcome("failed", f"its answer begins with {outcome.output[:60]!r}"), []
    return outcome, [dict(zip(fields, row, strict=True)) for row in rows]


def addresses_of(
    host: str, *, limit_s: float, environ: Mapping[str, str]
) -> tuple[bool, list[str]]:
    """Whether the name service answered, and the addresses of a host."""
    program = (
        "import socket, sys\n"
        "try: found = {row[4][0] for row in socket.getaddrinfo(sys.argv[1], None)}\n"
        "except OSError: found = set()\n"
        "print(*sorted(found))"
    )
    outcome = probe([sys.executable, "-c", program, host], limit_s=limit_s, environ=environ)
    return outcome.kind == "ok", outcome.output.split()


def disk_below(
    path: Path, *, limit_s: float, environ: Mapping[str, str]
) -> tuple[str, Disk | None]:
    """The disk below a folder; or why it cannot be used. A dead mount lets every call hang."""
    program = (
        "import dataclasses, json, pathlib, sys\n"
        "from zeroshard.doctor.facts import disk_of\n"
        "found = disk_of(pathlib.Path(sys.argv[1]))\n"
        "print(json.dumps(found and dataclasses.asdict(found)))"
    )
    command = [sys.executable, "-c", program, str(path)]
    outcome = probe(command, limit_s=limit_s, environ=environ)
    if outcome.kind != "ok":
        return outcome.text, None
    found = json.loads(outcome.output)
    return ("", Disk(**found)) if found else ("nothing can be written there", None)
