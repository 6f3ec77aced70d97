"""Writes weights as the files of torch that other libraries read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from zeroshard.checkpoint.export import PART, prepare, put_in_place
from zeroshard.checkpoint.export_plan import (
    Shard,
)
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError


def write_bins(
    shards: Sequence[Shard],
    directory: str | Path,
    *,
    filename: str,
    read: Callable[[str], Tensor],
) -> list[Path]:
    """Write files with ``torch.save`` that ``weights_only=True`` can load. Returns their paths.

    ``read(name)`` returns a weight ``[*shape]`` in host memory. One file at a time is in memory. Files
    get their names when all are complete.

    Raises:
        CheckpointError: a file cannot be written.
    """
    directory = Path(directory)
    hold = prepare(directory, filename, sum(shard.weights_nbytes for shard in shards))
    parts = [directory / (shard.file + PART) for shard in shards]
    try:
        for shard, part in zip(shards, parts, strict=True):
            _save(part, {weight.name: read(weight.name) for weight in shard.weights})
        return put_in_place(directory, filename, shards)
    finally:
        for part in parts:
            with suppress(OSError):  # left by a failure that was raised already
                part.unlink(missing_ok=True)
        hold.close()


def _save(path: Path, state: dict[str, Tensor]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{path} cannot be written: {text}.") from error
