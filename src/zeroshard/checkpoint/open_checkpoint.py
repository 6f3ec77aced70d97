"""Opens a checkpoint directory with the reader of its format."""

from __future__ import annotations

from pathlib import Path

from zeroshard.checkpoint.deepspeed.files import is_deepspeed
from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.directory import resolve
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import CheckpointReader, Source


def open_checkpoint(directory: str | Path, tag: object = None) -> Source:
    """Open a checkpoint of ZeroShard or of DeepSpeed. ``tag=None``: the latest.

    Raises:
        CheckpointError: there is none, or it is not complete.
    """
    path = resolve(directory, tag)
    if not (path / MANIFEST).exists() and is_deepspeed(path):
        return DeepSpeedReader(path)
    return CheckpointReader(path)
