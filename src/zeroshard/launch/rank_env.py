"""The environment variables that ranks get from the launcher.

Every value is only a default: a variable that the user exported wins.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

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
