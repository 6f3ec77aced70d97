"""Finds checkpoints below the folder of a program, and the files that belong to its model."""

from __future__ import annotations

import shutil
from pathlib import Path

from zeroshard.errors import CheckpointError, UsageError

MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
"""What ``from_pretrained`` reads beside weights."""


def holders(directory: Path) -> list[Path]:
    """The folders one level below that have checkpoints, as a Trainer and an Accelerator make them.

    Sorted by the number at the end of the name (``checkpoint-20``), then by name.
    """

    def order(folder: Path) -> tuple[int, str]:
        number = folder.name.rpartition("-")[2]
        return (int(number) if number.isdecimal() else -1), folder.name

    found = [path for path in directory.iterdir() if path.is_dir() and (path / "latest").is_file()]
    return sorted(found, key=order)


def holder(directory: Path, tag: str | None) -> tuple[Path, str | None]:
    """Where to look for a checkpoint: the folder and its tag.

    That is ``directory``, or if it has none and no ``latest`` the last of :func:`holders`. ``tag`` may
    then name one of them.

    Raises:
        CheckpointError: ``tag`` names none.
    """
    if (directory / "latest").is_file():
        return directory, tag
    below = {path.name: path for path in holders(directory)}
    name, _, inner = (tag or "").partition("/")
    if not below or (name and (directory / name).is_dir() and name not in below):
        return directory, tag
    if tag is None:
        return list(below.values())[-1], None
    if name not in below:
        raise CheckpointError(f"{directory} has no {tag}. There are {', '.join(list(below)[-5:])}.")
    return below[name], inner or None


def check_is_free(out: Path) -> None:
    """Refuse a folder that has weights.

    Raises:
        UsageError: it has.
    """
    weights = sorted(path.name for path in out.glob("*.safetensors")) if out.is_dir() else []
    if weights:
        raise UsageError(
            f"{out} has weights already ({weights[0]}). Give --overwrite, or another --out."
        )


def copy_model_files(source: Path, out: Path, *, overwrite: bool) -> list[Path]:
    """Copy what lies beside a checkpoint and belongs to its model.

    ``source``: the folder of the checkpoint. Looked at are this folder and the one above. ``overwrite``:
    also files that ``out`` has, which are of the model whose weights are replaced.
    """
    copied = []
    for name in MODEL_FILES:
        beside = [folder / name for folder in (source, source.parent) if (folder / name).is_file()]
        if beside and (overwrite or not (out / name).exists()):
            shutil.copyfile(beside[0], out / name)
            copied.append(out / name)
    return copied
