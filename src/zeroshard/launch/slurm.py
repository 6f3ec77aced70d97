"""Reads the hosts and ranks of a SLURM job, and builds ``srun`` commands.

Only environment variables are read (``SLURM_*``, as the manual pages of ``srun`` and ``sbatch``
describe them). There are three situations. A job with several nodes and no step yet: the launcher
starts ``srun``. A step with one task per node: this process is the launcher of its node. A step with
one task per rank: this process becomes a rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.errors import LaunchError

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

    @property
    def one_rank_per_task(self) -> bool:
        """Whether a node has several tasks, so that each task is meant to be a rank."""
        return self.in_step and self.num_tasks > len(self.hosts)

    @property
    def port(self) -> int:
        """The rendezvous port, made from the job id, since jobs that share a node need different ones."""
        return 20000 + self.job_id % 10000


def read_slurm(env: Mapping[str, str]) -> SlurmJob | None:
    """The SLURM job that ``env`` describes; None outside of a job."""
    if "SLURM_JOB_ID" not in env:
        return None
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    hosts = expand_nodelist(nodelist) or ("localhost",)
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    in_step = step.isdigit() and int(step) < _FIRST_OWN_STEP
    return SlurmJob(
        job_id=_number(env, "SLURM_JOB_ID", 0),
        hosts=hosts,
        in_step=in_step,
        proc_id=_number(env, "SLURM_PROCID", 0),
        local_id=_number(env, "SLURM_LOCALID", 0),
        node_id=_number(env, "SLURM_NODEID", 0),
        num_tasks=_number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1)),
        tasks_per_node=_number(env, "SLURM_NTASKS_PER_NODE", 0),
    )


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


def rank_env(job: SlurmJob, *, master_addr: str | None, master_port: int | None) -> dict[str, str]:
    """The variables of the rank that this task becomes (one task per rank).

    Raises:
        LaunchError: the nodes have different numbers of tasks.
    """
    per_node = job.num_tasks // len(job.hosts)
    if per_node * len(job.hosts) != job.num_tasks:
        raise LaunchError(
            f"SLURM started {job.num_tasks} tasks on {len(job.hosts)} nodes, so nodes have "
            "different numbers of ranks; use srun --ntasks-per-node=N with the same N everywhere."
        )
    return {
        "RANK": str(job.proc_id),
        "LOCAL_RANK": str(job.local_id),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(job.node_id),
        "MASTER_ADDR": master_addr or job.hosts[0],
        "MASTER_PORT": str(master_port or job.port),
        "LOCAL_SIZE": str(per_node),
        "CROSS_RANK": str(job.node_id),
        "CROSS_SIZE": str(len(job.hosts)),
    }


def srun_command(
    num_nodes: int, hosts: Sequence[str], launcher: Sequence[str], extra: Sequence[str] = ()
) -> list[str]:
    """The ``srun`` command that starts one launcher per node. Empty ``hosts``: any nodes of the job.

    ``extra``: options of the user.
    """
    command = ["srun", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    if hosts:
        command.append(f"--nodelist={','.join(hosts)}")
    return [*command, "--kill-on-bad-exit=1", *extra, *launcher]


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


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else default
