"""Starts ``torch.distributed`` under DeepSpeed's names, for libraries that are new enough.

These are Accelerate, Transformers, PEFT and Lightning. A release that is too old for torch, or for what
these names do today, would fail late and with an unrelated message. So it is refused at its first call.
Only libraries in use are checked, and nothing is imported for that.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from datetime import timedelta
from importlib import metadata
from typing import Any, NamedTuple

from zeroshard.comm import env
from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.logs import log_dist_once, logger
from zeroshard.errors import UsageError
from zeroshard.session import join
from zeroshard.session.session import decline


class Consumer(NamedTuple):
    """A library that calls us.

    ``mark`` shows that it is in use: a module that is imported, or ``module:attribute`` that is not
    empty; several, with spaces between them, if all of them must be present.
    """

    name: str
    mark: str
    oldest: str
    tested: str  # the newest release that the tests ran with
    why: str  # what an older one does wrong


ACCELERATOR_EXISTS = "accelerate.state:AcceleratorState._shared_state"

CONSUMERS = (
    Consumer(
        "accelerate",
        ACCELERATOR_EXISTS,  # Transformers imports the module, too
        oldest="1.8.0",
        tested="1.15.0",
        why="it calls step() inside no_sync() while it accumulates gradients, and its "
        "clip_grad_norm_() returns no norm",
    ),
    Consumer(
        "transformers",
        # Neither models nor helpers imported from the Trainer's module use ZeroShard. A Trainer makes
        # an Accelerator before it calls us.
        f"transformers.trainer {ACCELERATOR_EXISTS}",
        oldest="4.47.1",
        tested="5.23.0",
        why="its Trainer cannot resume with torch 2.6 or newer",
    ),
    Consumer(
        "peft",
        "peft.peft_model",
        oldest="0.7.1",
        tested="0.21.2",
        why="it saves adapters as pickle files",
    ),
    Consumer(
        "lightning",
        "lightning.pytorch.strategies.deepspeed",
        oldest="2.2.5",
        tested="2.6.6",
        why="at stage 3 it fails in model_sharded_context()",
    ),
)


def check_consumers() -> None:
    """Check the libraries that are in use. Rank 0 logs once which of them are newer than tested.

    Raises:
        UsageError: a library is too old. Ranks that open a session get the reason.
    """
    found = versions(CONSUMERS)
    if problems := too_old(found):
        decline(f"UsageError: {problems[0]}")
        raise UsageError("\n".join(problems))
    for line in newer(found):
        log_dist_once(line, ranks=[0])


def versions(consumers: Iterable[Consumer]) -> dict[str, str]:
    """Name -> version of the libraries in use. A library without a known version is left out."""
    found = {}
    for consumer in consumers:
        if is_marked(consumer.mark):
            version = getattr(sys.modules.get(consumer.name), "__version__", None)
            try:
                found[consumer.name] = str(version or metadata.version(consumer.name))
            except metadata.PackageNotFoundError:
                continue
    return found


def is_marked(mark: str) -> bool:
    """Whether the mark of a :class:`Consumer` is present.

    >>> is_marked("sys"), is_marked("sys:path"), is_marked("never.imported"), is_marked("sys:nothing")
    (True, True, False, False)
    >>> is_marked("sys sys:path"), is_marked("sys never.imported")
    (True, False)
    """
    return all(_is_present(part) for part in mark.split())


def _is_present(mark: str) -> bool:
    name, _, path = mark.partition(":")
    value: Any = sys.modules.get(name)
    for attribute in filter(None, path.split(".")):
        value = getattr(value, attribute, None)
    return value is not None and (not path or bool(value))


def too_old(found: Mapping[str, str]) -> list[str]:
    """What is wrong with these versions, one line for each library.

    >>> too_old({"accelerate": "1.15.0"})
    []
    """
    return [
        f"{row.name} {found[row.name]} is too old for ZeroShard, which needs {row.oldest} or newer: "
        f"{row.why}. Run: pip install --upgrade '{row.name}>={row.oldest}'"
        for row in CONSUMERS
        if row.name in found and numbers(found[row.name]) < numbers(row.oldest)
    ]


def newer(found: Mapping[str, str]) -> list[str]:
    """A line for each library whose major or minor version is above the newest that was tested.

    >>> newer({"peft": "0.21.9"})
    []
    """
    return [
        f"{row.name} {found[row.name]} is newer than {row.tested}, the newest version that "
        "ZeroShard was tested with"
        for row in CONSUMERS
        if row.name in found and numbers(found[row.name])[:2] > numbers(row.tested)[:2]
    ]


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, at least three, for comparing releases.

    >>> numbers("5.0.0rc1"), numbers("1.16.dev0")
    ((5, 0, 0), (1, 16, 0))
    """
    leading = re.match(r"\d+(?:\.\d+)*", version)
    found = tuple(int(part) for part in leading[0].split(".")) if leading else ()
    return found + (0,) * (3 - len(found))


# ---------------------------------------------------------------------- the default group


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
