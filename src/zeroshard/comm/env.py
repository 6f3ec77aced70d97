"""Finds out which rank this process is and which device it trains on.

This is the only reader of the environment variables of launchers: torchrun and DeepSpeed (``RANK``,
``WORLD_SIZE``, ``LOCAL_RANK``), Open MPI and Slurm. Without any of them the process is the only rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zeroshard.errors import LaunchError, UsageError

DEFAULT_TIMEOUT = timedelta(minutes=10)

#: Launcher -> its names of rank, world size, local rank, local world size.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
}


@dataclass(frozen=True)
class RankInfo:
    """The numbers of this process among all. ``launcher``: where they come from."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "none"


@dataclass(frozen=True)
class RunName:
    """The launcher's name for this run, and the number of this attempt at it."""

    run: str = ""
    attempt: int = 0


def rank_info_of(environ: Mapping[str, str] | None = None, *, mpi: bool = True) -> RankInfo:
    """The numbers of this process according to its environment.

    Slurm's variables count only if ``MASTER_ADDR`` is set too: an interactive shell of Slurm has them as
    well, and is one process.

    Raises:
        LaunchError: the environment has a rank but no world size, or a rank outside the world size.
    """
    env = os.environ if environ is None else environ
    for launcher, (rank, world, local_rank, local_world) in _LAUNCHERS.items():
        if launcher != "torchrun" and not mpi:
            continue
        if launcher == "slurm" and "MASTER_ADDR" not in env:
            continue
        if rank not in env:
            continue
        if world not in env:
            raise LaunchError(
                f"{rank} is {env[rank]} but {world} is not set, so the number of ranks is unknown. "
                "Start the program with a launcher, or set both."
            )
        rank_info = RankInfo(
            rank=_integer(env, rank, 0),
            world_size=_integer(env, world, 1),
            local_rank=_integer(env, local_rank, 0),
            local_world_size=_integer(env, local_world, 1),
            launcher=launcher,
        )
        if not 0 <= rank_info.rank < rank_info.world_size:
            raise LaunchError(
                f"{rank} is {rank_info.rank} but {world} is {rank_info.world_size}: ranks go from 0 to "
                f"{rank_info.world_size - 1}. Check how the program is started."
            )
        return rank_info
    return RankInfo()


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
            f"mpirun started {rank_info.world_size} ranks, {rank_info.local_world_size} of them on this "
            "host, and MASTER_ADDR is not set, so the ranks cannot find each other. Pass on the address "
            "of rank 0's host (mpirun -x MASTER_ADDR=...), or use zeroshard launch --launcher openmpi."
        )


def adopt_mpi(port: int, environ: MutableMapping[str, str] | None = None) -> RankInfo:
    """Set torchrun's variables from those of Open MPI; ``port`` is used unless ``MASTER_PORT`` is set.

    Raises:
        LaunchError: mpirun did not start this process, or ``MASTER_ADDR`` is missing with several hosts.
    """
    env = os.environ if environ is None else environ
    names = _LAUNCHERS["mpi"]
    rank_info = rank_info_of({name: env[name] for name in names if name in env})
    if rank_info.launcher != "mpi":
        raise LaunchError(
            f"mpi_discovery: {names[0]} is not set, so Open MPI did not start this process. Start the "
            "program with mpirun, or leave the call out: other launchers say who is which rank."
        )
    check_master(rank_info)
    numbers = (
        rank_info.rank,
        rank_info.world_size,
        rank_info.local_rank,
        rank_info.local_world_size,
    )
    env.update(zip(_LAUNCHERS["torchrun"], map(str, numbers), strict=True))
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", str(port))
    return rank_info


def default_timeout(environ: Mapping[str, str] | None = None) -> timedelta:
    """The timeout of collectives: ``DEEPSPEED_TIMEOUT`` minutes, or ten minutes."""
    env = os.environ if environ is None else environ
    text = env.get("DEEPSPEED_TIMEOUT", "")
    return timedelta(minutes=_integer(env, "DEEPSPEED_TIMEOUT", 0)) if text else DEFAULT_TIMEOUT


def uses_cuda(environ: Mapping[str, str] | None = None) -> bool:
    """Whether there is a CUDA device and ``DS_ACCELERATOR`` does not ask for the CPU."""
    env = os.environ if environ is None else environ
    return env.get("DS_ACCELERATOR", "").lower() != "cpu" and torch.cuda.is_available()


def default_backend() -> str:
    """``nccl`` with a CUDA device and a build of torch that has NCCL, else ``gloo``."""
    return "nccl" if uses_cuda() and dist.is_nccl_available() else "gloo"


def local_device(rank_info: RankInfo | None = None) -> torch.device:
    """The device that this process trains on: the CUDA device of its local rank, or the CPU."""
    return _own_gpu(rank_info or current_rank_info()) if uses_cuda() else torch.device("cpu")


def own_device(named: torch.device | str | None, rank_info: RankInfo) -> torch.device:
    """The device that a program names for this rank.

    None, and a CUDA device without an index, mean the device of :func:`local_device`.

    Raises:
        UsageError: ``named`` is a CUDA device that does not exist.
    """
    if named is None:
        return local_device(rank_info)
    device = torch.device(named)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise UsageError(
            f"device={str(named)!r}: torch finds {count} CUDA devices here. Leave device out, or look at "
            "CUDA_VISIBLE_DEVICES, the driver, and whether this build of torch has CUDA."
        )
    return device if device.index is not None else _own_gpu(rank_info)


def _own_gpu(rank_info: RankInfo) -> torch.device:
    return torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())


def _integer(env: Mapping[str, str], key: str, default: int) -> int:
    text = env.get(key, "")
    if not text:
        return default
    if not text.strip().isdigit():
        raise LaunchError(f"{key} is {text!r}, which is not a whole number.")
    return int(text)
