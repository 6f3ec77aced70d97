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
import tensor_parallel_model
import torch
from saved_runs import everywhere, failure
from support import mesh_runs
from support.mesh_runs import differences
from test_checkpoint_disk_faults import failing
from test_checkpoint_faults import check_tidy, check_whole
from torch import Tensor
from zeroshard_testing import RankEnd, run_ranks

from zeroshard import Engine
from zeroshard.core.mesh import Mesh

STAGE = 3
RUNS = {  # the mesh, and the module with the functions of the run
    "tensor": (tensor_parallel_model.TP, tensor_parallel_model),  # with tied and frozen parameters
    "pipeline": (Mesh(pipeline=2, data_shard=2), mesh_runs),
}
RANKS = 4


def open_engine(run: str) -> Engine:
    mesh, functions = RUNS[run]
    return functions.open_engine(mesh, STAGE)


def train(run: str, engine: Engine) -> None:
    RUNS[run][1].train(engine, 1)


def everything(run: str, engine: Engine) -> dict[str, Tensor]:
    return RUNS[run][1].everything(engine)


def kept(root: Path, rank: int) -> Path:
    return root.parent / f"first.{rank}.pt"


def saves(name: str, root: Path) -> None:
    with open_engine(name) as engine:
        train(name, engine)
        engine.save_checkpoint(root, "first")
        torch.save(everything(name, engine), kept(root, engine.global_rank))


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> dict[str, Path]:
    """The runs, each with the checkpoint ``first``."""
    folder = tmp_path_factory.mktemp("good")
    roots = {name: folder / name / "run" for name in RUNS}
    for name, root in roots.items():
        root.parent.mkdir()
        run_ranks(saves, RANKS, name, root)
    return roots


@pytest.fixture
def run(request, good: dict[str, Path], tmp_path: Path) -> tuple[str, Path]:
    """The name of a run, and a copy of it."""
    root = good[request.param]
    shutil.copytree(root.parent, tmp_path, dirs_exist_ok=True)
    return request.param, tmp_path / root.name


def dies(name: str, root: Path, point: str, who: tuple[int, ...]) -> tuple[str, str]:
    engine = open_engine(name)
    engine.load_checkpoint(root)
    train(name, engine)

    def at(here: str) -> None:
        if here == point and engine.global_rank in who:
            os.kill(os.getpid(), signal.SIGKILL)

    engine._saver.watch_point = at
    kind, text = failure(lambda: engine.save_checkpoint(root, "second"))
    engine.close(text)
    return kind, text


def goes_on(name: str, root: Path, expected: str) -> str:
    with open_engine(name) as engine:
        path, _ = engine.load_checkpoint(root)
        if expected == "first":
            assert (
                differences(everything(name, engine), torch.load(kept(root, engine.global_rank)))
                == []
            )
        train(name, engine)
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
    name, root = run
    deaths = dict.fromkeys(who, signal.SIGKILL)
    ends = run_ranks(dies, RANKS, name, root, point, who, expect_death=deaths, timeout=50)
    for kind, text in (end for end in ends if not isinstance(end, RankEnd)):
        assert kind == "RankLost"
        assert f"rank {who[0]}" in text
    check_whole(root, {"first", newest})
    assert run_ranks(goes_on, RANKS, name, root, newest) == [newest] * RANKS
    check_whole(root, {"first", newest, "third"})
    check_tidy(root)


def breaks(name: str, root: Path, who: int) -> None:
    with open_engine(name) as engine, contextlib.ExitStack() as broken:
        engine.load_checkpoint(root)
        before = everything(name, engine)

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
        assert differences(everything(name, engine), before) == []
        engine._saver.watch_point = lambda _point: None
        train(name, engine)
        engine.save_checkpoint(root, "third")


@pytest.mark.parametrize(("run", "who"), [("tensor", 0), ("pipeline", 3)], indirect=["run"])
def test_a_full_disk_of_one_rank_ends_the_save_on_all(run, who):
    name, root = run
    run_ranks(breaks, RANKS, name, root, who)
    check_whole(root, {"first", "third"})
    check_tidy(root)


def refused(name: str, root: Path, why: str, is_read: bool) -> None:
    """All ranks raise the same error. Nothing is loaded, unless the values are read (``is_read``)."""
    with open_engine(name) as engine:
        train(name, engine)
        before = everything(name, engine)
        kind, text = failure(lambda: engine.load_checkpoint(root, "first"))
        assert kind == "CheckpointError"
        assert why in text
        assert len(set(everywhere(text))) == 1
        if not is_read:
            assert differences(everything(name, engine), before) == []


@pytest.mark.parametrize("run", RUNS, indirect=True)
def test_a_damaged_box_is_refused_on_all_ranks(run):
    name, root = run
    path = root / "first" / "rank-00001-of-00004.safetensors"
    text = bytearray(path.read_bytes())
    text[-1] ^= 1
    path.write_bytes(text)
    run_ranks(refused, RANKS, name, root, "is damaged between bytes", True)


@pytest.mark.parametrize("run", ["tensor"], indirect=True)
def test_boxes_that_overlap_are_refused_on_all_ranks(run):
    """The checksum of the manifest is right."""
    name, root = run
    path = root / "first" / "manifest.json"
    head = json.loads(path.read_text())
    first, second = head["body"]["parameters"]["blocks.0.up.weight"]["tensors"]["value"]["boxes"]
    second["start"] = [first["extent"][0] - 1, 0]
    canonical = json.dumps(head["body"], sort_keys=True, separators=(",", ":"))
    head["sha256"] = hashlib.sha256(canonical.encode()).hexdigest()
    path.write_text(json.dumps(head))
    run_ranks(refused, RANKS, name, root, "boxes overlap at 10 of axis 0", False)
