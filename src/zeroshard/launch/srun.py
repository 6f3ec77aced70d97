"""Builds ``srun`` commands, and the variables of ranks that ``srun`` started.

There are three situations. A job with several nodes and no step yet: the launcher starts ``srun``. A
step with one task per node: this process is the launcher of its node. A step with one task per rank:
this process becomes a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.slurm import SlurmJob
from zeroshard.errors import LaunchError


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
