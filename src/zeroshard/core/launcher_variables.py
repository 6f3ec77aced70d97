"""The variables by which launchers number the processes that they start, and those of a SLURM job.

``SLURM_*`` are read as the manual pages of ``srun`` and ``sbatch`` describe them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from zeroshard.errors import LaunchError


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


# Steps that SLURM itself starts (batch script, interactive shell, extern) have this id or a higher one.
_FIRST_OWN_STEP = 0xFFFFFFF0

_ITEM = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """The allocation and, inside a step, the numbers of this task."""

    job_id: int
    hosts: tuple[str, ...]
    in_step: bool
    proc_id: int
    local_id: int
    node_id: int
    num_tasks: int
    tasks_per_node: int
    step: int = 0
    tasks_here: int = 0

    @property
    def one_rank_per_task(self) -> bool:
        """Whether a node has several tasks, so that each task is meant to be a rank."""
        return self.in_step and self.num_tasks > len(self.hosts)

    @property
    def port(self) -> int:
        """The rendezvous port, made from the ids, since steps that share a node need different ones."""
        return 20000 + (self.job_id + 997 * self.step) % 10000


def read_slurm(env: Mapping[str, str]) -> SlurmJob | None:
    """The SLURM job that ``env`` describes; None outside of a job."""
    if "SLURM_JOB_ID" not in env:
        return None
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    hosts = expand_nodelist(nodelist) or ("localhost",)
    in_step, node_id = is_in_step(env), _number(env, "SLURM_NODEID", 0)
    tasks = _per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return SlurmJob(
        job_id=_number(env, "SLURM_JOB_ID", 0),
        hosts=hosts,
        in_step=in_step,
        proc_id=_number(env, "SLURM_PROCID", 0),
        local_id=_number(env, "SLURM_LOCALID", 0),
        node_id=node_id,
        num_tasks=_number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1)),
        tasks_per_node=_number(env, "SLURM_NTASKS_PER_NODE", 0),
        step=_number(env, "SLURM_STEP_ID", 0) if in_step else 0,
        tasks_here=tasks[node_id] if node_id < len(tasks) else 0,
    )


def is_in_step(env: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process.

    A shell of ``salloc`` and a script of ``sbatch`` have the number of tasks too, but are no tasks.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdigit() and int(step) < _FIRST_OWN_STEP


def expand_nodelist(text: str) -> tuple[str, ...]:
    """The host names of a SLURM node list, in its order.

    >>> expand_nodelist("n[01-03,07],login,r[1-2]c[8]")
    ('n01', 'n02', 'n03', 'n07', 'login', 'r1c8', 'r2c8')
    """
    names: list[str] = []
    for item in _ITEM.findall(text.replace(" ", "")):
        if item:
            names.extend(_expand(item, text))
    return tuple(names)


def _expand(item: str, text: str) -> list[str]:
    """The host names of one item of the list. Several brackets give all combinations."""
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [head]
    ranges, closing, tail = rest.partition("]")
    heads: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or not closing:
            raise LaunchError(f"SLURM node list {text!r}: cannot read {part!r} in {item!r}.")
        low, high = match[1], match[2] or match[1]
        heads += [f"{head}{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)]
    tails = _expand(tail, text)
    return [one + two for one in heads for two in tails]


def _per_node(text: str) -> list[int]:
    """Tasks of each node: ``"2(x2),1"`` is ``[2, 2, 1]``."""
    counts: list[int] = []
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip()):
            counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else default
