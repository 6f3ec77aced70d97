"""Finds the checkpoint of a Trainer or an Accelerator from which a run goes on after a restart."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from os import PathLike
from pathlib import Path

from zeroshard.checkpoint.directory import LATEST, open_checkpoint
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.comm.connect import said_by_rank_0
from zeroshard.errors import CheckpointError

logger = logging.getLogger("zeroshard")

_NAME = re.compile(r"checkpoint([-_])(\d+)")  # of Transformers, and of Accelerate
_WRITTEN_LAST = "trainer_state.json"  # by the Trainer


def newest_checkpoint(folder: str | PathLike[str], *, read_all: bool = True) -> str | None:
    """The newest of the checkpoints in ``folder`` that can be loaded; None if there is none.

    ``folder``: the ``output_dir`` of a Trainer, or the ``checkpoints`` of an Accelerator's project. Pass
    the result on, so that the same command starts a run and continues it::

        trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))

    A checkpoint that is not complete or damaged is passed over with a warning. ``read_all``: read every
    byte and compare checksums; otherwise only sizes. Rank 0 decides for all ranks of the process group,
    so every rank calls it; without a process group every rank looks for itself.

    Raises:
        CheckpointError: the folder cannot be read; the same on every rank.
    """
    found = said_by_rank_0(
        lambda: _newest(Path(folder), read_all),
        "looking for the newest checkpoint",
        f"{folder} was not searched",
    )
    return found or None


def _newest(folder: Path, read_all: bool) -> str:
    """Empty: there is none."""
    names = [name for name in folder.glob("checkpoint*") if _NAME.fullmatch(name.name)]
    for path in sorted(names, key=lambda path: int(_number(path)[1]), reverse=True):
        fault = _fault_of(path, read_all)
        if not fault:
            return str(path)
        logger.warning("%s is passed over: %s", path, fault)
    return ""


def _number(path: Path) -> tuple[str, str]:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return found[1], found[2]


def _fault_of(path: Path, read_all: bool) -> str:
    """Why a checkpoint cannot be loaded; empty if it can."""
    if _number(path)[0] == "-":
        try:
            json.loads((path / _WRITTEN_LAST).read_text())
        except (OSError, ValueError, RecursionError) as error:
            return f"{_WRITTEN_LAST}, which is written last, cannot be read ({error})"
    engines = [
        path,
        *sorted(path.glob("pytorch_model*")),
    ]  # Accelerate has a folder for each engine
    found = [engine for engine in engines if (engine / LATEST).is_file()]
    if not found:
        return f"it has no file {LATEST!r}, so there is no checkpoint of an engine in it"
    try:
        for engine in found:
            with contextlib.closing(open_checkpoint(engine)) as source:
                if isinstance(source, CheckpointReader):
                    faults = source.verify() if read_all else [*source.problems().values()]
                    if faults:
                        return faults[0]
    except CheckpointError as error:
        return str(error)
    return ""
