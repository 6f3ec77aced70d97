"""Finds out which rank this process is and which device it trains on.

This is the only reader of the environment variables of launchers: torchrun and DeepSpeed (``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``), MPI (also PMI) and Slurm. Without any of them the process is
the only rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.core.launcher_variables import OPEN_MPI, TORCHRUN, numbering_of, read_slurm
from zeroshard.device.choice import accelerator_type, device_of_rank
from zeroshard.errors import LaunchError

DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class RankInfo:
    """The numbers of this process among all processes of the run. ``launcher``: where they come from.

    They say nothing about data: see :class:`DataCoordinate`.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"

    @property
    def is_main_rank(self) -> bool:
        """Whether this rank prints and writes for all."""
        return self.rank == 0


@dataclass(frozen=True)
class DataCoordinate:
    """Which share of every batch this rank gets: number ``dp_rank`` of ``dp_size``.

    ``dp_size`` divides batches and averages gradients.
    """

    dp_rank: int
    dp_size: int


@dataclass(frozen=True)
class RunName:
    """The launcher's name for this run, and the number of this attempt at it."""

    run: str = ""
    attempt: int = 0


def rank_info_of(environ: Mapping[str, str] | None = None, *, mpi: bool = True) -> RankInfo:
    """The numbers of this process according to its environment.

    Slurm's variables count only for tasks of ``srun``, or if ``MASTER_ADDR`` is set too: an interactive
    shell of Slurm has them as well, and is one process.

    Raises:
        LaunchError: the environment has a rank but no world size or local rank, or a rank outside the
            world size.
    """
    env = os.environ if environ is None else environ
    row = numbering_of(env, mpi=mpi)
    if row is None:
        return RankInfo()
    if row.world_size not in env:
        raise LaunchError(
            f"{row.rank} is {env[row.rank]} but {row.world_size} is not set, so the number of ranks is "
            "unknown. Start the program with a launcher, or set both."
        )
    job = read_slurm(env) if row.launcher == "slurm" else None
    tasks_here = job.tasks_here if job is not None else 0
    rank_info = RankInfo(
        rank=_integer(env, row.rank, 0),
        world_size=_integer(env, row.world_size, 1),
        local_rank=_integer(env, row.local_rank, 0),
        local_world_size=tasks_here or _integer(env, row.local_world_size, 1),
        launcher=row.launcher,
    )
    if not 0 <= rank_info.rank < rank_info.world_size:
        raise LaunchError(
            f"{row.rank} is {rank_info.rank} but {row.world_size} is {rank_info.world_size}: ranks go "
            f"from 0 to {rank_info.world_size - 1}. Check how the program is started."
        )
    if row.launcher == "mpi" and rank_info.world_size > 1 and row.local_rank not in env:
        raise LaunchError(
            f"{row.rank} is {rank_info.rank} of {rank_info.world_size}, and {row.local_rank} is not set, "
            "so it is unknown which device of its host this rank trains on. Set RANK, WORLD_SIZE, "
            "LOCAL_RANK and MASTER_ADDR, or start the program with zeroshard launch."
        )
    return rank_info


def current_rank_info(environ: Mapping[str, str] | None = None) -> RankInfo:
    """Like :func:`rank_info_of`, but the numbers of an existing process group win."""
    rank_info = rank_info_of(environ)
    if dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        if (rank, world) != (rank_info.rank, rank_info.world_size):
            local = rank_info.local_rank if rank_info.launcher != "none" else 0
            return RankInfo(rank, world, local, rank_info.local_world_size, "program")
    return rank_info


def run_name(environ: Mapping[str, str] | None = None) -> RunName:
    """Run and attempt, as ZeroShard's launcher or torchrun names them."""
    env = os.environ if environ is None else environ
    run = env.get("ZEROSHARD_RUN_ID") or env.get("TORCHELASTIC_RUN_ID") or ""
    attempt = env.get("ZEROSHARD_ATTEMPT") or env.get("TORCHELASTIC_RESTART_COUNT") or "0"
    return RunName("" if run == "none" else run, int(attempt) if attempt.isdigit() else 0)


def check_master(rank_info: RankInfo) -> None:
    """Check that ranks that MPI started on several hosts know the address of rank 0.

    MPI itself does not set an address.

    Raises:
        LaunchError: there are several hosts and ``MASTER_ADDR`` is not set.
    """
    several_hosts = rank_info.world_size > rank_info.local_world_size
    if rank_info.launcher == "mpi" and several_hosts and "MASTER_ADDR" not in os.environ:
        raise LaunchError(
            f"mpirun started {rank_info.world_size} ranks, {rank_info.local_world_size} of them "
            "on this host, and MASTER_ADDR is not set, so the ranks cannot find each other. Pass "
            "the address of rank 0's host (mpirun -x MASTER_ADDR=...), or use zeroshard launch "
            "--launcher openmpi."
        )


def meeting_place(port: int, environ: Mapping[str, str] | None = None) -> tuple[str, int]:
    """Address and port of rank 0's store. Tasks of ``srun`` meet at the first node of their step.

    ``port``: where the environment gives none.
    """
    env = os.environ if environ is None else environ
    address = "127.0.0.1"
    row = numbering_of(env)
    job = read_slurm(env) if row is not None and row.launcher == "slurm" else None
    if job is not None and "MASTER_ADDR" not in env:
        address, port = job.hosts[0] if len(job.hosts) > 1 else address, job.port
    return env.get("MASTER_ADDR", address), int(env.get("MASTER_PORT", port))


def adopt_mpi(port: int, environ: MutableMapping[str, str] | None = None) -> RankInfo:
    """Set torchrun's variables from those of Open MPI; ``port`` is used unless ``MASTER_PORT`` is set.

    Raises:
        LaunchError: mpirun did not start this process, or ``MASTER_ADDR`` is missing with several hosts.
    """
    env = os.environ if environ is None else environ
    rank_info = rank_info_of({name: env[name] for name in OPEN_MPI if name in env})
    if rank_info.launcher != "mpi":
        raise LaunchError(
            f"mpi_discovery: {OPEN_MPI.rank} is not set, so Open MPI did not start this process. Start "
            "the program with mpirun, or leave the call out: other launchers set the rank "
            "themselves."
        )
    check_master(rank_info)
    numbers = (
        rank_info.rank,
        rank_info.world_size,
        rank_info.local_rank,
        rank_info.local_world_size,
    )
    env.update(zip(TORCHRUN[1:5], map(str, numbers), strict=True))
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(port))
    return rank_info


def an_agent_started_this(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the agent of a launcher (ours, torchrun) started the ranks of this host, all together."""
    env = os.environ if environ is None else environ
    return "TORCHELASTIC_RUN_ID" in env


def launcher_serves_store(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the agent of the launcher serves the store that the ranks meet through."""
    env = os.environ if environ is None else environ
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def default_timeout(environ: Mapping[str, str] | None = None) -> timedelta:
    """The timeout of collectives: ``DEEPSPEED_TIMEOUT`` minutes, or ten minutes."""
    env = os.environ if environ is None else environ
    text = env.get("DEEPSPEED_TIMEOUT", "")
    return timedelta(minutes=_integer(env, "DEEPSPEED_TIMEOUT", 0)) if text else DEFAULT_TIMEOUT


def default_backend() -> str:
    """The backend of torch for the accelerator of this host, such as ``nccl``; on the CPU ``gloo``.

    An accelerator without a backend in this build of torch uses ``gloo``.
    """
    backend = dist.Backend.default_device_backend_map.get(accelerator_type() or "cpu", "gloo")
    return backend if dist.is_backend_available(backend) else "gloo"


def local_device(rank_info: RankInfo | None = None) -> torch.device:
    """The device that this process trains on: the accelerator of its local rank, or the CPU."""
    return device_of_rank((rank_info or current_rank_info()).local_rank)


def _integer(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key, "")
    if not text:
        return default
    if not text.strip().isdigit():
        raise LaunchError(f"{key} is {text!r}, which is not a whole number.")
    return int(text)
