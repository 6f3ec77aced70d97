"""Ends a run between two steps after a signal, and lets the next one go on from where it stopped.

``zeroshard launch --min-ranks`` tells every rank with how many ranks the run began. Rank 0 tells the
launcher with which numbers of ranks the batch stays the same.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.directory import NEWEST
from zeroshard.comm.env import run_name
from zeroshard.config import LoadedConfig
from zeroshard.config.batch import fitting_sizes
from zeroshard.errors import UsageError
from zeroshard.run.batch_note import BatchNote, Told, told_by_launcher, write_note
from zeroshard.session.comm_session import CommSession
from zeroshard.watchdog.stop_agreement import StopAgreement, StopSignals

logger = logging.getLogger("zeroshard")

_MICRO = "train_micro_batch_size_per_gpu"


@dataclass(frozen=True, slots=True)
class Resumed:
    """What a run goes on from. ``path``: the checkpoint; None: there was none, and the run is new."""

    path: str | None
    client_state: dict[str, Any]


def tell_launcher(told: Told, loaded: LoadedConfig) -> None:
    """Write for the launcher with which numbers of ranks the batch stays the same. For rank 0."""
    if told.directory is None or loaded.mesh is None:
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


MARKER = "preempted"
"""Name of the file in the directory of checkpoints that tells a preempted run from a finished one."""

ClientState = Callable[[], Mapping[str, Any]]


def check_can_save_in(save_dir: str | PathLike[str]) -> None:
    """Make the directory, and check that this process may write into it: after a signal it is too late.

    Raises:
        UsageError: it cannot be made, or written into.
    """
    try:
        Path(save_dir).mkdir(parents=True, exist_ok=True)
        may_write = os.access(save_dir, os.W_OK | os.X_OK)
    except OSError as error:
        raise UsageError(
            f"preemption: {str(save_dir)!r} cannot be used as a directory of checkpoints: "
            f"{error.strerror}. Nothing could be saved after a signal. Give another save_dir."
        ) from error
    if not may_write:
        raise UsageError(
            f"preemption: this process may not write into {str(save_dir)!r}, so nothing could be saved "
            "after a signal. Give another save_dir, or change its permissions."
        )


class Preemption:
    """What one engine does after a signal. ``happened``: all ranks have stopped, or are to stop, here.

    ``save_dir``: the engine saves there and ends the process. None: the program does both.
    """

    def __init__(self, watch: CommSession) -> None:
        self._signals = StopSignals()
        try:
            self._agreement: StopAgreement = watch.stop_agreement(self._signals)
        except BaseException:
            self._signals.close()
            raise
        self._forwards = 0  # of an evaluation since the last step
        self.happened = False
        self.save_dir: Path | None = None
        self._client_state: ClientState = dict

    def save_in(self, save_dir: str | PathLike[str], client_state: ClientState | None) -> None:
        """Save there after a signal.

        Raises:
            UsageError: see :func:`check_can_save_in`.
        """
        check_can_save_in(save_dir)
        self.save_dir = Path(save_dir)
        self._client_state = client_state or dict
        (self.save_dir / MARKER).unlink(missing_ok=True)

    def after_step(self, engine: Any) -> None:
        """A point: the end of a step."""
        self._forwards = 0
        self._at(engine, 0)

    def before_forward(self, engine: Any) -> None:
        """A point, unless the forward is one inside a step."""
        accumulation = engine.accumulation
        if accumulation.micro_steps or accumulation.divided or accumulation.uncounted:
            return
        self.before_batch(engine, training=torch.is_grad_enabled() and engine.module.training)

    def before_batch(self, engine: Any, *, training: bool) -> None:
        """A point: no step is running. ``training``: the next forward begins one."""
        if training:
            self._at(engine, math.inf)
            return
        self._forwards += 1
        self._at(engine, self._forwards)

    def _at(self, engine: Any, number: float) -> None:
        if self.happened or not self._agreement.stops_at((engine.global_steps, number)):
            return
        self.happened = True
        if engine.is_main_rank:
            plan = (
                f"saving in {str(self.save_dir)!r}" if self.save_dir else "the program is to save"
            )
            logger.warning(
                "preempted by %s: all ranks stop after step %d, %s",
                self._agreement.asked, engine.global_steps, plan,
            )  # fmt: skip
        if self.save_dir is not None:
            self._save_and_end(engine, self.save_dir)

    def _save_and_end(self, engine: Any, save_dir: Path) -> None:
        """Save, and end this process with exit code 0.

        Raises:
            SystemExit: always, unless the save fails.
        """
        engine.save_checkpoint(save_dir, client_state=self._client_state())
        engine.wait_for_checkpoint()
        if engine.is_main_rank:
            words = {"signal": self._agreement.asked, "step": engine.global_steps}
            (save_dir / MARKER).write_text(json.dumps(words) + "\n")
        engine.close()
        raise SystemExit(0)

    def close(self) -> None:
        """Restore the handlers of before."""
        self._signals.close()
