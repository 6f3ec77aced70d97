"""The environment variables that ranks get from the launcher.

Every value of :func:`rank_defaults` is only a default: a variable that the user exported wins. A process
that ``mpirun`` or ``srun`` has started for one rank gets the numbers of that rank.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from zeroshard.core.launcher_variables import TORCHRUN, SlurmJob, numbering_of
from zeroshard.errors import LaunchError

# Prefixes of the variables that are passed to other hosts.
EXPORTED = (
    *("NCCL_", "TORCH_", "PYTORCH_", "GLOO_", "OMP_", "ZEROSHARD_", "UCX_", "FI_"),
    *("DS_", "DEEPSPEED_"),
)
ALSO_EXPORTED = "ZEROSHARD_EXPORT"
"""A variable with more such prefixes, separated by commas."""
SECRET_VARIABLE = "ZEROSHARD_SECRET"
"""What the launchers of the hosts of a run show each other (:mod:`zeroshard.launch.relay`). Ranks do not
get it, since their launcher connects them."""
MASTER_VARIABLE = "ZEROSHARD_MASTER_ADDR"
"""Tells ranks the address of the first of several hosts: ``MASTER_ADDR`` is that of their own relay."""
_SECRET_CHARACTERS = 16
_EXPORTED_NAMES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HF_HOME", "TOKENIZERS_PARALLELISM")


DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""A file of lines ``NAME=value`` for ranks of other hosts, in the home or the working directory."""


def check_secret(env: Mapping[str, str]) -> str:
    """The secret that a user, or another launcher, has given the run; "": none.

    Raises:
        LaunchError: it is so short that it can be guessed.
    """
    secret = env.get(SECRET_VARIABLE, "")
    if 0 < len(secret) < _SECRET_CHARACTERS:
        raise LaunchError(
            f"{SECRET_VARIABLE} has {len(secret)} characters, which others can guess. Give all launchers "
            f"the same {_SECRET_CHARACTERS} random characters or more, such as those of `openssl rand "
            "-hex 32`; leave it out where one command starts all hosts, which makes a secret itself."
        )
    return secret


def new_secret(env: Mapping[str, str]) -> dict[str, str]:
    """The variable with the secret of a run whose launchers one command starts: a new one if none is set.

    Raises:
        LaunchError: as :func:`check_secret`.
    """
    return {SECRET_VARIABLE: check_secret(env) or secrets.token_hex(32)}


def rank_defaults(
    env: Mapping[str, str],
    *,
    cores: int,
    num_local: int,
    node_rank: int = 0,
    num_nodes: int = 1,
    run_id: str,
) -> dict[str, str]:
    """Variables to add to ``env`` for the ranks of one node; none that is set in ``env``.

    ``run_id`` names the folder of the run (:mod:`zeroshard.run.run_folder`).

    ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE`` is among them because torch (2.13) otherwise keeps the store
    keys of a dead attempt, and gloo connects to the addresses in them. With ``expandable_segments``
    the allocator of a GPU maps memory where a block grows: units of several sizes come and go in each
    step, which otherwise leaves holes.
    """
    wanted = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(max(1, cores // num_local)),
        "PYTHONFAULTHANDLER": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "LOCAL_SIZE": str(num_local),
        "CROSS_RANK": str(node_rank),
        "CROSS_SIZE": str(num_nodes),
        "ZEROSHARD_RUN_ID": run_id,
    }
    if not any(name in env for name in _ALLOCATOR):
        wanted[_ALLOCATOR[0]] = "expandable_segments:True"
    return {name: value for name, value in wanted.items() if name not in env}


_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The names under which torch reads the settings of its allocator, the present one first."""


def devices_of(slots: Sequence[int], env: Mapping[str, str]) -> str | None:
    """The value of ``CUDA_VISIBLE_DEVICES`` for ``slots``, which count the devices that ``env`` makes
    visible; None if these are all that is known.

    >>> devices_of((0, 2), {"CUDA_VISIBLE_DEVICES": "4,5,6"})
    '4,6'
    """
    visible = [name for name in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    if not visible:
        return None if tuple(slots) == tuple(range(len(slots))) else ",".join(map(str, slots))
    return ",".join(visible[slot] for slot in slots if slot < len(visible))


def with_directory_first(env: Mapping[str, str], directory: str) -> dict[str, str]:
    """``PYTHONPATH`` with ``directory`` first, as a variable to add; empty if ``directory`` is empty."""
    if not directory:
        return {}
    others = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {"PYTHONPATH": os.pathsep.join([directory, *(e for e in others if e != directory)])}


def exported(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``env`` that ranks on other hosts get as well, sorted by name."""
    begin = (*EXPORTED, *filter(None, env.get(ALSO_EXPORTED, "").split(",")))
    return {
        name: env[name] for name in sorted(env) if name in _EXPORTED_NAMES or name.startswith(begin)
    }


def read_exports(text: str, name: str) -> dict[str, str]:
    """The variables in the ``text`` of a file ``name`` (:data:`DEEPSPEED_ENVIRONMENT_NAME`).

    Empty lines, and lines that begin with ``#``, are skipped.

    >>> read_exports("NCCL_DEBUG=INFO\\n# a comment\\nX=a=b", ".deepspeed_env")
    {'NCCL_DEBUG': 'INFO', 'X': 'a=b'}

    Raises:
        LaunchError: a line has no ``=``.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, equals, value = line.strip().partition("=")
        if not equals:
            raise LaunchError(f"{name}, line {number}: {line!r} is not of the form NAME=value.")
        found[key.strip()] = value
    return found


def mpi_rank_env(
    env: Mapping[str, str], master_addr: str | None, master_port: int | None
) -> dict[str, str] | None:
    """The variables of the rank that this process of ``mpirun`` becomes; None if it is the only one.

    Raises:
        LaunchError: there are several hosts, and no address of rank 0; or a number is missing.
    """
    row = numbering_of(env)
    if row is None or row.launcher != "mpi" or env.get(row.world_size) == "1":
        return None
    numbers = {name: env.get(name, "") for name in row[1:5]}
    if unknown := [name for name, text in numbers.items() if not text.isdigit()]:
        raise LaunchError(
            f"mpirun started this launcher as one of several processes, and {unknown[0]} is not set, so "
            "its rank is unknown. Start one launcher on each host with --no_ssh --node_rank, or use a "
            "hostfile."
        )
    address = master_addr or env.get("MASTER_ADDR")
    if address is None and env[row.world_size] != env[row.local_world_size]:
        raise LaunchError(
            f"mpirun started {env[row.world_size]} processes, {env[row.local_world_size]} of them on "
            "this host, and MASTER_ADDR is not set, so the ranks cannot find each other. Give "
            "--master_addr, the address of rank 0's host."
        )
    return {
        **dict(zip(TORCHRUN[1:5], numbers.values(), strict=True)),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(master_port or env.get("MASTER_PORT", 29500)),
    }


def slurm_rank_env(
    job: SlurmJob, *, master_addr: str | None, master_port: int | None
) -> dict[str, str]:
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
