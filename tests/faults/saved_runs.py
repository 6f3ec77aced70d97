"""A saved run for tests that damage it, and the state that loading it should restore."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint_model import differences, everything, open_engine, train

from zeroshard import Engine
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.errors import ZeroShardError

STAGE = 3


def keep_expected(engine: Engine, root: Path, tag: str) -> None:
    """Save next to ``root`` all state that loading ``tag`` must restore. Collective."""
    expected = everything(engine)
    if engine.global_rank == 0:
        torch.save(expected, root.parent / f"{root.name}.{tag}.pt")


def saves(root: Path, *tags: str, stage: int = STAGE, **keys) -> None:
    """Train one step before each save. Every checkpoint contains the frozen weights, so that it needs no
    other."""
    with open_engine(stage, checkpoint={"frozen": "always"}, **keys) as engine:
        for tag in tags:
            train(engine, 1)
            engine.save_checkpoint(root, tag, {"note": tag})
            keep_expected(engine, root, tag)


def equals_expected(engine: Engine, root: Path, tag: str) -> list[str]:
    """What differs from the state that was saved as ``tag``. Collective."""
    expected = torch.load(root.parent / f"{root.name}.{tag}.pt")
    return differences(everything(engine), expected)


def failure(act) -> tuple[str, str]:
    """Class and text of the error that a call raised; empty if it raised none."""
    try:
        act()
    except ZeroShardError as error:
        return type(error).__name__, str(error)
    return "", ""


def everywhere(value: object) -> list:
    """The value of every rank. Collective."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def contents(place: Path) -> dict[str, str]:
    """Every file and directory below ``place``, files by hash."""
    found = {}
    for folder, folders, files in os.walk(place):
        for name in [*folders, *files]:
            path = Path(folder, name)
            mode = path.lstat().st_mode
            is_file = stat.S_ISREG(mode)
            what = hashlib.sha256(path.read_bytes()).hexdigest() if is_file else oct(mode)
            found[str(path.relative_to(place))] = what
    return found


def saved_run(root: Path, stage: int = STAGE, **keys: object) -> Engine:
    """An engine after two steps. The state after the first is saved."""
    engine = open_engine(stage, **keys)
    train(engine, 1)
    engine.save_checkpoint(root, "first")
    keep_expected(engine, root, "first")
    train(engine, 1)
    return engine


def check_refused(engine: Engine, place: Path, *needles: str, tag: str = "second") -> str:
    """A save into ``place`` raises the same error on all ranks and changes no file."""
    before = everything(engine)
    there = contents(place) if os.path.isdir(place) else None
    everywhere(0)
    kind, text = failure(lambda: engine.save_checkpoint(place, tag))
    everywhere(0)
    assert kind == "CheckpointError", (kind, text)
    assert len(set(everywhere(text))) == 1
    for needle in (f"checkpoint {tag!r} was not saved to {place}", *needles):
        assert needle in text
    assert differences(everything(engine), before) == []
    assert there is None or contents(place) == there
    return text


def check_goes_on(engine: Engine, root: Path) -> None:
    """Training and saving still work, and earlier checkpoints are unchanged."""
    train(engine, 1)
    engine.save_checkpoint(root, "third")
    keep_expected(engine, root, "third")
    assert [name for name in os.listdir(root) if name.startswith(".")] == []
    for tag in ("first", "third"):
        with CheckpointReader(root / tag) as saved:
            assert saved.verify() == []
    for tag in ("first", "third"):
        engine.load_checkpoint(root, tag)
        assert equals_expected(engine, root, tag) == []
