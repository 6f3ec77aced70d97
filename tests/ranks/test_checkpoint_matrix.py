"""A run on any mesh, stage, precision and store continues to the bit, and loads into others."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from support.covering import FULL, covering
from support.mesh_runs import (
    MOMENTS,
    build,
    differences,
    everything,
    open_engine,
    train,
)
from torch import Tensor
from typer.testing import CliRunner
from zeroshard_testing import run_ranks

from zeroshard import Engine
from zeroshard.checkpoint.reader import CheckpointReader, full
from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zeroshard.cli.main import main
from zeroshard.core.mesh import Mesh

STEPS = 5 if FULL else 3
DROPOUT = 0.1


class Layout(NamedTuple):
    """A mesh and what else a run can choose. ``store``: where optimizer state and parameters are."""

    mesh: Mesh
    stage: int
    precision: str = "fp32"
    store: str = "device"

    def open(self, folder: Path) -> Engine:
        disk = {"device": "nvme", "nvme_path": str(folder / "swap")}
        where = {"device": {}, "host": {"device": "cpu"}, "disk": disk}[self.store]
        zero: dict[str, Any] = {"offload_optimizer": where} if where else {}
        if where and self.stage == 3:
            zero["offload_param"] = where
        keys = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        if self.precision == "fp16":
            keys["fp16"]["initial_scale_power"] = 6
        return open_engine(self.mesh, self.stage, model=build(dropout=DROPOUT), zero=zero, **keys)


TP, PP, SHARD = (4, 4, 4) if FULL else (3, 2, 2)
"""Ranks of a dimension. Three tensor ranks have parts of unequal sizes, as four have."""
MESHES = {
    "one rank": Mesh(),
    "dp 8": Mesh(data_shard=8),
    f"tp {TP} dp 2": Mesh(data_shard=2, tensor=TP),
    f"pp {PP} dp 2": Mesh(pipeline=PP, data_shard=2),
    "pp 2 dp 2 tp 2": Mesh(pipeline=2, data_shard=2, tensor=2),
    f"replicate 2 shard {SHARD}": Mesh(data_replicate=2, data_shard=SHARD),
}
REST = {  # at stages 1 and 3; all masters are fp32
    "one rank": (("fp16", "device"), ("fp32", "disk")),
    "dp 8": (("fp32", "disk"), ("bf16", "device")),
    f"tp {TP} dp 2": (("bf16", "host"), ("fp32", "disk")),
    f"pp {PP} dp 2": (("fp32", "device"), ("bf16", "disk")),
    "pp 2 dp 2 tp 2": (("fp16", "device"), ("fp32", "host")),
    f"replicate 2 shard {SHARD}": (("bf16", "device"), ("fp16", "host")),
}
SOME = {
    *((f"tp {TP} dp 2", 3), ("pp 2 dp 2 tp 2", 1)),
    *((f"replicate 2 shard {SHARD}", 3), ("one rank", 1)),
}
LAYOUTS = {
    f"{name}, stage {stage}, {' '.join(rest)}": Layout(MESHES[name], stage, *rest)
    for name in MESHES
    for stage, rest in zip((1, 3), REST[name], strict=True)
    if FULL or (name, stage) in SOME
}
LOADED: dict[str, list[str]] = {}
"""What each layout loads: every mesh, stage, precision and store after every other one."""
NAMES = {layout: name for name, layout in LAYOUTS.items()}
for row in covering([(*new, *old) for new in LAYOUTS.values() for old in LAYOUTS.values()]):
    LOADED.setdefault(NAMES[Layout(*row[:4])], []).append(NAMES[Layout(*row[4:])])
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tag_of(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "_")


def keep(engine: Engine, found: dict[str, Tensor], path: Path) -> None:
    """Write the state of each pipeline stage."""
    at = engine.mesh.coordinate(engine.global_rank)
    if not any(at[name] for name in at if name != "pipeline"):
        torch.save(found, path.with_suffix(f".{at['pipeline']}"))


def kept(path: Path) -> dict[str, Tensor]:
    """What all stages have written."""
    return {
        k: v for part in path.parent.glob(f"{path.stem}.*") for k, v in torch.load(part).items()
    }


def trains(name: str, root: Path) -> None:
    """Twice ``STEPS`` without a break, with a checkpoint after the first half."""
    layout, tag = LAYOUTS[name], tag_of(name)
    with layout.open(root.parent) as engine:
        train(engine, STEPS)
        engine.save_checkpoint(root, tag, {"note": name})
        keep(engine, everything(engine), root.parent / f"{tag}-half.part")
        train(engine, STEPS)
        assert engine.skipped_steps == 0
        keep(engine, everything(engine), root.parent / f"{tag}-end.part")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("matrix") / "run"
    (root.parent / "swap").mkdir()
    for name, layout in LAYOUTS.items():
        run_ranks(trains, layout.mesh.world_size, name, root)
    return root


def names_in(state: dict[str, Tensor]) -> set[str]:
    return {key.removesuffix(" master") for key in state if key.endswith(" master")}


def masters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but the values of parameters, which are the rounded masters."""
    rounded = names_in(state)
    return {name: value for name, value in state.items() if name not in rounded}


def loads(name: str, root: Path) -> set[str]:
    """Continue the own run, then load others, and save the last again."""
    layout = LAYOUTS[name]
    with layout.open(root.parent) as engine:
        engine.load_checkpoint(root, tag_of(name))
        train(engine, STEPS)
        assert differences(everything(engine), kept(root.parent / f"{tag_of(name)}-end.part")) == []
        for other in LOADED[name]:
            _, client = engine.load_checkpoint(root, tag_of(other))
            assert client == {"note": other}
            assert engine.global_steps == STEPS
            found, expected = everything(engine), kept(root.parent / f"{tag_of(other)}-half.part")
            assert differences(masters(found), masters(expected)) == [], (name, other)
            for fqn in names_in(found):
                assert torch.equal(found[fqn], found[f"{fqn} master"].to(DTYPES[layout.precision]))
        engine.save_checkpoint(root, "again-" + tag_of(name), {"note": other})
        return {*found}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_continues_to_the_bit_and_loads_other_runs(root, name):
    names = run_ranks(loads, LAYOUTS[name].mesh.world_size, name, root, timeout=100)
    last = LOADED[name][-1]
    assert set().union(*names) == {*kept(root.parent / f"{tag_of(last)}-half.part")}
    assert ckpt("diff", root / tag_of(last), root / ("again-" + tag_of(name)), "--json") == "[]\n"


def ckpt(*words: object) -> str:
    result = CliRunner().invoke(main, ["ckpt", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("name", LAYOUTS)
def test_tools_read_whole_tensors_of_every_layout(root, tmp_path, name):
    tag = tag_of(name)
    expected = kept(root.parent / f"{tag}-half.part")
    names = names_in(expected)
    assert "every byte is what was saved" in ckpt("verify", root, "--tag", tag)
    shown = json.loads(ckpt("show", root, "--tag", tag, "--json"))
    assert {row["name"]: row["shape"] for row in shown["parameters"]} == {
        fqn: list(expected[fqn].shape) for fqn in names
    }
    ckpt("export", root, "--tag", tag, "--out", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    state = get_fp32_state_dict_from_zero_checkpoint(str(root), tag)
    assert names < found.keys() == state.keys()
    with CheckpointReader(root / tag) as source:
        for fqn in names:
            assert torch.equal(found[fqn], expected[f"{fqn} master"])
            assert torch.equal(state[fqn], expected[f"{fqn} master"])
            for moment in MOMENTS:
                assert torch.equal(full(source, fqn, moment), expected[f"{fqn} {moment}"])


# -- a checkpoint of an older release --------------------------------------------------------------

VERSION_1 = Path(__file__).parent.parent / "unit" / "fixtures" / "checkpoint_version_1"
"""Saved by two ranks at stage 3 in bf16, with the last release that knew no meshes."""
OLD_VALUES = "1a14cd7ed0752bfb260f1e49b04aa0c556e2a4ee4bb99bd1d22b16474eafb28f"
"""SHA-256 of all masters and moments, as that release gathered them before it saved."""


def loads_old(mesh: Mesh, stage: int) -> dict[str, Tensor]:
    with open_engine(mesh, stage, model=build(dropout=DROPOUT)) as engine:
        _, client = engine.load_checkpoint(VERSION_1)
        assert (client, engine.global_steps) == ({"note": "version 1"}, 3)
        return everything(engine)


@pytest.mark.parametrize(
    ("name", "stage"),
    [("one rank", 1), (f"tp {TP} dp 2", 3), (f"pp {PP} dp 2", 1), ("pp 2 dp 2 tp 2", 3)],
)
def test_a_checkpoint_of_an_older_release_loads_into_every_mesh(name, stage):
    found: dict[str, Tensor] = {}
    for part in run_ranks(loads_old, MESHES[name].world_size, MESHES[name], stage):
        found |= part
    digest = hashlib.sha256()
    for fqn, _ in build().named_parameters():
        for kind in ("master", *MOMENTS):
            digest.update(found[f"{fqn} {kind}"].numpy().tobytes())
    assert digest.hexdigest() == OLD_VALUES
