"""The variables by which launchers number the processes that they start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zeroshard.core.slurm import is_in_step


class Numbering(NamedTuple):
    """The names of the variables of rank, world size, local rank and local world size.

    ``launcher``: "torchrun", "mpi" or "slurm". ``key``: the variable that must be set for this row.
    """

    launcher: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    key: str


def _mpi(rank: str, world: str, local_rank: str, local_world: str, key: str = "") -> Numbering:
    return Numbering("mpi", rank, world, local_rank, local_world, key or rank)


TORCHRUN = Numbering("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK")
OPEN_MPI = _mpi(
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
SLURM = Numbering(
    *("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "SLURM_PROCID",
)
NUMBERINGS = (
    TORCHRUN,
    OPEN_MPI,
    _mpi(*(f"MV2_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    _mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", key="MPI_LOCALRANKID"),
    _mpi("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE", key="PMI_LOCAL_RANK"),
    SLURM,
    _mpi("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    _mpi("PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE"),
)
"""The first row whose ``key`` is set counts. MPI comes before Slurm, which may have started ``mpirun``'s
servers, and PMI alone comes after it, because ``srun`` sets both."""


def numbering_of(env: Mapping[str, str], *, mpi: bool = True) -> Numbering | None:
    """The row that numbers this process; None if no launcher has started it. ``mpi``: only torchrun's.

    Slurm's variables count for tasks of ``srun``, and where ``MASTER_ADDR`` is set.
    """
    for row in NUMBERINGS if mpi else (TORCHRUN,):
        if row.key not in env or row.rank not in env:
            continue
        if row is SLURM:
            if not is_in_step(env) and "MASTER_ADDR" not in env:
                continue
            if "SLURM_STEP_NUM_TASKS" in env:
                return row._replace(world_size="SLURM_STEP_NUM_TASKS")
        return row
    return None
