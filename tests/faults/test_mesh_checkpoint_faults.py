"""Checkpoints of a run on a mesh that is killed, or whose disk fails: whole, or not there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from saved_runs import everywhere, failure
from support.mesh_runs import differences, everything, open_engine, train
from test_checkpoint_disk_faults import failing
from test_checkpoint_faults import check_tidy, check_whole

from zeroshard.core.mesh import Mesh
from zeroshard.testing import RankEnd, run_ranks

STAGE = 3
MESHES = {
    "tensor": Mesh(data_shard=2, tensor=2),
    "pipeline": Mesh(pipeline=2, data_shard=2),
}
RANKS = 4


def kept(root: Path, rank: int) -> Path:
    return root.parent / f"first.{rank}.pt"


def saves(mesh: Mesh, root: Path) -> None:
    with open_engine(mesh, STAGE) as engine:
        train(engine, 1)
        engine.save_checkpoint(root, "first")
        torch.save(everything(engine), kept(root, engine.global_rank))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """For each mesh, a run with the checkpoint ``first``."""
    folder = tmp_path_factory.mktemp("good")
    roots = {name: folder / name / "run" for name in MESHES}
    for name, root in roots.items():
        root.parent.mkdir()
        run_ranks(saves, MESHES[name].world_size, MESHES[name], root)
    return roots


@pytest.fixture
def run(request, good: dict[str, Path], tmp_path: Path) -> tuple[Mesh, Path]:
    """The mesh and a copy of its run."""
    root = good[request.param]
    shutil.copytree(root.parent, tmp_path, dirs_exist_ok=True)
    return MESHES[request.param], tmp_path / root.name


on_each_mesh = pytest.mark.parametrize("run", MESHES, indirect=True)


def dies(mesh: Mesh, root: Path, point: str, who: tuple[int, ...]) -> tuple[str, str]:
    engine = open_engine(mesh, STAGE)
    engine.load_checkpoint(root)
    train(engine, 1)

    def at(here: str) -> None:
        if here == point and engine.global_rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._saver.watch_point = at
    kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
    engine.close(text)
    return kind, text


def goes_on(mesh: Mesh, root: Path, expected: str) -> str:
    with open_engine(mesh, STAGE) as engine:
        path, _ = engine.load_checkpoint(root)
        if expected == "first":
            assert differences(everything(engine), torch.load(kept(root, engine.global_rank))) == []
        train(engine, 1)
        engine.save_checkpoint(root, "third")
        return Path(path).name


@pytest.mark.parametrize(
    ("run", "point", "who", "newest"),
    [
        ("tensor", "planned", (3,), "first"),
        ("pipeline", "reserved", (0, 2), "first"),
        ("tensor", "half", (1,), "first"),
        ("pipeline", "half", (3,), "first"),
        ("pipeline", "written", (1,), "first"),
        ("tensor", "manifest", (0,), "first"),
        ("pipeline", "latest", (0,), "second"),
    ],
    ids=str,
    indirect=["run"],
)
def test_a_killed_save_is_there_as_a_whole_or_not_at_all(run, point, who, newest):
    mesh, root = run
    deaths = dict.fromkeys(who, signal.SIGKILL)
    ends = run_ranks(dies, RANKS, mesh, root, point, who, expect_death=deaths, timeout=50)
    for kind, text in (end for end in ends if not isinstance(end, RankEnd)):
        assert kind == "RankLost"
        assert f"rank {who[0]}" in text
    check_whole(root, {"first", newest})
    assert run_ranks(goes_on, RANKS, mesh, root, newest) == [newest] * RANKS
    check_whole(root, {"first", newest, "third"})
    check_tidy(root)


def breaks(mesh: Mesh, root: Path, who: int) -> None:
    with open_engine(mesh, STAGE) as engine, contextlib.ExitStack() as broken:
        engine.load_checkpoint(root)
        before = everything(engine)

        def at(here: str) -> None:
            if here == "reserved" and engine.global_rank == who:
                broken.enter_context(failing("pwrite", errno.ENOSPC))

        engine._saver.watch_point = at
        kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
        broken.close()
        assert kind == "CheckpointError"
        assert f"rank {who}" in text
        assert "No space left on device (ENOSPC)" in text
        assert len(set(everywhere(text))) == 1
        assert differences(everything(engine), before) == []
        engine._saver.watch_point = lambda _point: None
        train(engine, 1)
        engine.save_checkpoint(root, "third")


@pytest.mark.parametrize(("run", "who"), [("tensor", 0), ("pipeline", 3)], indirect=["run"])
def test_a_full_disk_of_one_rank_ends_the_save_on_all(run, who):
    mesh, root = run
    run_ranks(breaks, RANKS, mesh, root, who)
    check_whole(root, {"first", "third"})
    check_tidy(root)


def refused(mesh: Mesh, root: Path, why: str) -> None:
    """Nothing is loaded from a damaged checkpoint, and all ranks raise the same error."""
    with open_engine(mesh, STAGE) as engine:
        train(engine, 1)
        before = everything(engine)
        kind, text = failure(lambda: engine.load_checkpoint(root, "first"))
        assert kind == "CheckpointError"
        assert why in text
        assert len(set(everywhere(text))) == 1
        if "manifest" in text:  # else the engine is half loaded, and says so
            assert differences(everything(engine), before) == []


@on_each_mesh
def test_a_damaged_box_is_refused_on_all_ranks(run):
    mesh, root = run
    path = root / "first" / "rank-00001-of-00004.safetensors"
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    run_ranks(refused, RANKS, mesh, root, "is damaged between bytes")


@pytest.mark.parametrize("run", ["tensor"], indirect=True)
def test_boxes_that_overlap_are_refused_on_all_ranks(run):
    """The checksum of the manifest is right."""
    mesh, root = run
    path = root / "first" / "manifest.json"
    head = json.loads(path.read_text())
    first, second = head["body"]["parameters"]["1.up.weight"]["tensors"]["value"]["boxes"]
    second["start"] = [first["extent"][0] - 1, 0]
    canonical = json.dumps(head["body"], sort_keys=True, separators=(",", ":"))
    head["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(head))
    run_ranks(refused, RANKS, mesh, root, "boxes overlap at 10 of axis 0")
