"""Starts ``torch.distributed`` under DeepSpeed's names."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

from zeroshard.comm import env
from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.logs import logger
from zeroshard.deepspeed.version_check import check_consumers
from zeroshard.session import join


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """:func:`zeroshard.init_distributed`. Does nothing if the default group exists.

    Raises:
        UsageError: a library that uses ZeroShard under DeepSpeed's name is too old.
    """
    check_consumers()
    join.init_distributed(
        dist_backend,
        auto_mpi_discovery,
        distributed_port,
        verbose,
        env.default_timeout() if timeout is None else timeout,
        init_method,
        dist_init_required,
        config,
        rank,
        world_size,
    )
    _tell_accelerate()


def mpi_discovery(distributed_port: int = 29500, verbose: bool = True) -> None:
    """Set rank, world size and address in the environment from what Open MPI's ``mpirun`` provides.

    Raises:
        LaunchError: Open MPI did not start this process.
    """
    rank_info = env.adopt_mpi(distributed_port)
    if verbose:
        logger.info("rank %d of %d, by Open MPI", rank_info.rank, rank_info.world_size)


def is_initialized() -> bool:
    """Whether there is a process group. Accelerate asks this first, and does no more if there is one."""
    found = bool(comm.is_initialized())
    if found:
        _tell_accelerate()
    return found


def _tell_accelerate() -> None:
    """Set Accelerate's backend.

    Accelerate looks for a backend before it asks us to create the group. Without a GPU it finds none, and
    would then treat every rank as the only one.
    """
    state = sys.modules.get("accelerate.state")
    shared: dict[str, Any] = getattr(getattr(state, "PartialState", None), "_shared_state", {})
    if shared.get("backend", "unset") is None:
        shared["backend"] = comm.backend_name()


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Any = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Nothing: the recorder is always on. ``comms_logger`` in the configuration makes it print."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Nothing, or an empty dict: the engine prints what collectives cost (``comms_logger``)."""
    return {} if return_dict else None


def reset_log() -> None:
    """Nothing: see :func:`configure`."""
