"""What an engine exchanges with the launcher of a run that restarts, and how it resumes.

``zeroshard launch --min-ranks`` tells every rank with how many ranks the run began. Rank 0 tells the
launcher with which numbers of ranks the batch stays the same.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from zeroshard.checkpoint.directory import NEWEST
from zeroshard.comm.env import run_name
from zeroshard.config import LoadedConfig
from zeroshard.config.fewer_ranks import RunBatch, fitting_sizes
from zeroshard.errors import UsageError
from zeroshard.run.batch_note import BatchNote, told_by_launcher, write_note

logger = logging.getLogger("zeroshard")

_MICRO = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from. ``path``: the checkpoint; None: there was none, and the run is new."""

    path: str | None
    client_state: dict[str, Any]


def batch_of_run() -> RunBatch | None:
    """What the launcher knows of the batch; None if the number of ranks does not change."""
    told = told_by_launcher()
    return None if told.full_ranks is None else RunBatch(told.full_ranks, told.batches)


def tell_launcher(loaded: LoadedConfig, *, rank: int) -> None:
    """Write for the launcher with which numbers of ranks the batch stays the same. Rank 0 writes."""
    told = told_by_launcher()
    if rank or told.full_ranks is None or told.directory is None or loaded.mesh is None:
        return
    mesh, config = loaded.mesh.mesh, loaded.config
    train, micro = config.train_batch_size, config.train_micro_batch_size_per_gpu
    if mesh.world_size != told.full_ranks or train is None or micro is None:
        return
    is_micro_given = loaded.origins[_MICRO] not in ("derived", "auto")
    is_shard_given = loaded.mesh.origins["data_shard"] not in ("derived", "default")
    fits = fitting_sizes(
        train, micro if is_micro_given else None, mesh=mesh, is_shard_given=is_shard_given
    )
    note = BatchNote(run_name().run, mesh.world_size, train, micro, is_micro_given, fits)
    try:
        write_note(told.directory, note)
    except OSError as error:
        logger.warning(
            "%s cannot be written (%s), so the launcher does not know with which numbers of ranks "
            "train_batch_size %d stays the same.", told.directory, error.strerror, train,
        )  # fmt: skip
    if fits == (mesh.world_size,):
        logger.warning(
            "--min-ranks has no effect: no smaller number of ranks keeps train_batch_size %d in "
            "micro-batches of %d.", train, micro,
        )  # fmt: skip


def resume(engine: Any, given: str | PathLike[str]) -> Resumed:
    """Load the newest checkpoint that is complete, undamaged and finite. Collective.

    ``given``: its directory, or "auto": the ``--checkpoint-dir`` of ``zeroshard launch``, else
    ``preemption.save_dir`` of the configuration.

    Raises:
        UsageError: "auto", and neither is given.
        CheckpointError: on every rank: the checkpoint is of another model, or all are damaged.
    """
    directory = _directory(engine, given)
    path, client_state = engine.load_checkpoint(directory, NEWEST, missing_ok=True)
    if engine.is_main_rank:
        if path is None:
            logger.info("resume: %s has no checkpoint, so the run starts anew.", directory)
        else:
            logger.info("resume: %s, step %d.", path, engine.global_steps)
    return Resumed(path, client_state)


def _directory(engine: Any, given: str | PathLike[str]) -> Path:
    if fspath(given) != "auto":
        return Path(given)
    told, configured = told_by_launcher().directory, engine.settings.preemption.save_dir
    if told is None and configured is None:
        raise UsageError(
            'resume="auto": the directory of the checkpoints is not known. Start the run with zeroshard '
            'launch --max-restarts N --checkpoint-dir DIR, give "preemption": {"save_dir": DIR}, or pass '
            "the directory: resume=DIR."
        )
    return told or Path(configured)
