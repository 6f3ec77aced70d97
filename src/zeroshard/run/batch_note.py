"""What rank 0 tells the launcher about the batch, in a file beside the checkpoints.

``zeroshard launch --min-ranks M`` may start fewer ranks again. Only the program knows its
``train_batch_size``. So when an engine is built on all ranks, rank 0 writes with which numbers of ranks
that batch stays the same. The file belongs to one run; that of another run is not read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

CHECKPOINT_DIR_VARIABLE = "ZEROSHARD_CHECKPOINT_DIR"
"""Tells the ranks ``--checkpoint-dir``."""
FULL_RANKS_VARIABLE = "ZEROSHARD_FULL_RANKS"
"""With ``--min-ranks``: the number of ranks with which the run began."""
BATCH_VARIABLE = "ZEROSHARD_TRAIN_BATCH"
"""With ``--min-ranks``, after the first attempt: the ``train_batch_size`` of the run."""
_NAME = ".batch.json"


@dataclass(frozen=True, slots=True)
class BatchNote:
    """One engine's batch. ``fits``: the numbers of ranks, at most ``num_ranks``, that keep it.

    ``micro_batch_size`` is kept if ``is_micro_given``, else it is at most that large with fewer ranks.
    ``batches``: ``train_batch_size`` of every engine of the run.
    """

    run: str
    num_ranks: int
    train_batch_size: int
    micro_batch_size: int
    is_micro_given: bool
    fits: tuple[int, ...]
    batches: tuple[int, ...] = ()

    def why(self, chosen: int, total: int) -> str:
        """Why only ``chosen`` of ``total`` ranks can be used."""
        return f"{self._batch} fits {chosen} ranks, and not {total}."

    def refusal(self, low: int, high: int) -> str:
        """Why no number of ranks from ``low`` to ``high`` can be used; with the numbers."""
        span = f"{low}" if low == high else f"{low} to {high}"
        those = ", ".join(map(str, self.fits))
        return (
            f"{self._batch} does not fit {span} rank{'' if high == 1 else 's'}, only {those}. Give a "
            "train_batch_size that more numbers of ranks divide, or a smaller micro batch."
        )

    @property
    def _batch(self) -> str:
        micro = f" in micro batches of {self.micro_batch_size}" if self.is_micro_given else ""
        return f"train_batch_size {self.train_batch_size}{micro}"


def write_note(directory: Path, note: BatchNote) -> None:
    """Write the note of an engine. A second engine of the run leaves what fits both.

    Raises:
        OSError: the directory cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    before = read_note(directory, note.run)
    batches = {note.train_batch_size, *(before.batches if before else ())}
    if before is not None and before.num_ranks == note.num_ranks:
        both = tuple(size for size in note.fits if size in before.fits)
        note = replace(min(before, note, key=lambda each: len(each.fits)), fits=both)
    note = replace(note, batches=tuple(sorted(batches)))
    fresh = directory / f"{_NAME}.new"
    fresh.write_text(json.dumps(asdict(note)))
    fresh.replace(directory / _NAME)


def read_note(directory: Path, run: str) -> BatchNote | None:
    """The note of the run named ``run``; None if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((directory / _NAME).read_text())
        lists = {name: tuple(found[name]) for name in ("fits", "batches")}
        note = BatchNote(**{**found, **lists})
        return note if note.run == run else None
    return None


@dataclass(frozen=True, slots=True)
class Told:
    """What the launcher tells an engine.

    ``directory``: ``--checkpoint-dir``. ``full_ranks``: the number of ranks with which the run began.
    ``batches``: ``train_batch_size`` of its engines; empty in the first attempt.
    """

    directory: Path | None = None
    full_ranks: int | None = None
    batches: tuple[int, ...] = ()


def told_by_launcher(environ: Mapping[str, str] | None = None) -> Told:
    """What ``zeroshard launch --max-restarts`` has told this rank; empty without it."""
    env = os.environ if environ is None else environ
    folder, ranks = env.get(CHECKPOINT_DIR_VARIABLE), env.get(FULL_RANKS_VARIABLE, "")
    batches = env.get(BATCH_VARIABLE, "").split(",")
    return Told(
        Path(folder) if folder else None,
        int(ranks) if ranks.isdigit() else None,
        tuple(int(batch) for batch in batches if batch.isdigit()),
    )


def restart_env(directory: Path, full_ranks: int | None, note: BatchNote | None) -> dict[str, str]:
    """The variables of :class:`Told` for the ranks. ``full_ranks``: None without ``--min-ranks``."""
    env = {CHECKPOINT_DIR_VARIABLE: os.path.abspath(directory)}
    if full_ranks is not None:
        env[FULL_RANKS_VARIABLE] = str(full_ranks)
        if note is not None:
            env[BATCH_VARIABLE] = ",".join(map(str, note.batches))
    return env
