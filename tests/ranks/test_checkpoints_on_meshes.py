"""A tensor-parallel run saves whole tensors: any other number and arrangement of ranks continues it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import differences, stores
from tensor_parallel_model import TP, Model, everything, open_engine, train
from zeroshard_testing import run_ranks

from zeroshard import Engine
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.core.mesh import Mesh


def keep(engine: Engine, path: Path) -> None:
    state = everything(engine)
    if engine.global_rank == 0:
        torch.save(state, path)


def trains(mesh: Mesh, stage: int, root: Path, keys: dict[str, Any]) -> None:
    """Six steps without a break, with a checkpoint after the third."""
    with open_engine(mesh, stage, **keys) as engine:
        train(engine, 3)
        engine.save_checkpoint(root, "third", {"note": 3})
        keep(engine, root.parent / "third.pt")
        train(engine, 3)
        keep(engine, root.parent / "sixth.pt")


def continues(mesh: Mesh, stage: int, root: Path, keys: dict[str, Any]) -> None:
    with open_engine(mesh, stage, **keys) as engine:
        engine.load_checkpoint(root, "third")
        train(engine, 3)
        assert differences(everything(engine), torch.load(root.parent / "sixth.pt")) == []


def carries(mesh: Mesh, stage: int, root: Path, tag: str, to: str) -> None:
    """Load what was saved, and save it again from this mesh."""
    with open_engine(mesh, stage) as engine:
        path, client = engine.load_checkpoint(root, tag)
        assert (Path(path).name, client) == (tag, {"note": 3})
        assert engine.global_steps == 3
        assert differences(everything(engine), torch.load(root.parent / "third.pt")) == []
        engine.save_checkpoint(root, to, client)


def version(path: Path) -> int:
    return json.loads((path / MANIFEST).read_text())["version"]


ASYNCHRONOUS = {"checkpoint": {"asynchronous": True}}


@pytest.mark.parametrize(
    ("stage", "store", "keys"),
    [(1, "device", {}), (3, "device", ASYNCHRONOUS), (3, "all on disk", {})],
    ids=["stage 1", "stage 3, asynchronous", "stage 3, on disk"],
)
def test_a_tensor_parallel_run_continues_on_any_ranks(tmp_path, stage, store, keys):
    root = tmp_path / "run"
    keys = {**keys, "zero_optimization": stores(tmp_path / "swap")[store]}
    run_ranks(trains, 4, TP, stage, root, keys)
    assert version(root / "third") == 2
    run_ranks(continues, 4, TP, stage, root, keys)
    tag = "third"
    for ranks in (4, 2, 1):
        run_ranks(carries, ranks, Mesh(data_shard=ranks), stage, root, tag, f"on_{ranks}")
        tag = f"on_{ranks}"
        assert version(root / tag) == 1
    run_ranks(carries, 4, TP, stage, root, tag, "back")
    assert version(root / "back") == 2
    with CheckpointReader(root / "third") as first, CheckpointReader(root / "back") as last:
        assert last.verify() == []
        assert list(first.parameters) == list(last.parameters)
        for name, parameter in first.parameters.items():
            value, again = (p.tensors["value"] for p in (parameter, last.parameters[name]))
            assert [part.box for part in value.boxes] == [part.box for part in again.boxes]


def test_every_element_of_a_tensor_parallel_run_is_saved_once(tmp_path):
    run_ranks(trains, 4, TP, 3, tmp_path / "run", {})
    with CheckpointReader(tmp_path / "run" / "third") as source:
        manifest = source.manifest
        assert manifest.mesh == "data_shard 2 x tensor 2"
        assert manifest.dp_ranks == (0, 0, 1, 1)
        shapes = {name: list(param.shape) for name, param in Model().named_parameters()}
        assert {name: list(p.shape) for name, p in manifest.parameters.items()} == shapes
        split = {name for name, p in manifest.parameters.items() if p.tensors["value"].boxes}
        assert split == {
            f"blocks.{at}.{name}"
            for at in range(2)
            for name in ("up.weight", "up.bias", "down.weight")
        }
        copies = [
            file.name
            for file in manifest.files
            if file.name.startswith(("rank-00001", "rank-00003"))
        ]
        keys = {
            f.file
            for name, p in manifest.parameters.items()
            if name not in split
            for t in p.tensors.values()
            for f in t.fragments
        }
        assert not {manifest.files[at].name for at in keys} & set(copies)


# -- nodes that do not share a disk ----------------------------------------------------------------


def saves_apart(roots: list[Path]) -> None:
    """Ranks 0 and 1 are one node, 2 and 3 another."""
    with open_engine(TP, 3) as engine:
        train(engine, 1)
        engine.save_checkpoint(roots[engine.global_rank // 2], "first")
        keep(engine, roots[0].parent / "first.pt")


def loads_apart(roots: list[Path]) -> None:
    with open_engine(TP, 3) as engine:
        engine.load_checkpoint(roots[engine.global_rank // 2], "first")
        assert differences(everything(engine), torch.load(roots[0].parent / "first.pt")) == []


def shards(root: Path) -> set[str]:
    return {path.name for path in (root / "first").glob("rank-*")}


def test_boxes_are_sent_to_the_nodes_that_lack_them(tmp_path):
    roots = [tmp_path / "left", tmp_path / "right"]
    run_ranks(saves_apart, 4, roots)
    names = [f"rank-0000{rank}-of-00004.safetensors" for rank in range(4)]
    assert [shards(root) for root in roots] == [set(names[:2]), set(names[2:])]
    run_ranks(loads_apart, 4, roots)
    assert [shards(root) for root in roots] == [set(names[:2]), set(names[2:])]  # nothing was sent
    run_ranks(loads_apart, 4, roots[::-1])
    assert [shards(root) for root in roots] == [{*names}, {*names}]
