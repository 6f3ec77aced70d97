"""A tensor-parallel run saves whole tensors: any other number and arrangement of ranks continues it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_model import MOMENTS, differences
from kit import config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from zeroshard import Engine
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.core.mesh import Mesh
from zeroshard.testing import run_ranks
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

BATCH = 8
TP = Mesh(data_shard=2, tensor=2)
PLAN = {
    **{f"blocks.{at}.up": ColwiseParallel() for at in range(2)},
    **{f"blocks.{at}.down": RowwiseParallel() for at in range(2)},
}


class Block(nn.Module):
    """A column-split and a row-split linear; 22 hidden features over two ranks, dropout after both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, hidden), nn.Linear(hidden, 12)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """Split, replicated, tied and frozen parameters, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(12, 12, bias=False)
        self.blocks = nn.ModuleList(Block(22) for _ in range(2))
        self.base = nn.Linear(12, 12).requires_grad_(False)
        self.head = nn.Linear(12, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.base(x))


def open_engine(mesh: Mesh, stage: int) -> Engine:
    """An engine on ``mesh``, whose ranks have generators for their samples."""
    model = Model()
    if mesh.tensor > 1:
        sizes = (mesh.dp_size, mesh.tensor)
        devices = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize_module(model, devices["tensor"], PLAN)
    engine = Engine(
        model,
        config=config(stage, gradient_clipping=0.5),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh=mesh,
    )
    torch.manual_seed(50 + engine.dp_rank)
    return engine


def train(engine: Engine, steps: int) -> None:
    """Train on this rank's share of the global batches."""
    for _ in range(steps):
        draw = torch.Generator().manual_seed(engine.global_steps)
        whole = torch.randn(BATCH, 12, generator=draw)
        x = whole.chunk(engine.dp_size)[engine.dp_rank]
        engine.backward(engine(x).square().mean())
        engine.step()


def everything(engine: Engine) -> dict[str, Tensor]:
    """All whole tensors by name. Collective."""
    found = {name: values.clone() for name, values in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[f"{name} master"] = safe_get_full_fp32_param(param).clone()
            for key in (*MOMENTS, "step"):
                value = safe_get_full_optimizer_state(param, key)
                assert value is not None
                found[f"{name} {key}"] = value.clone()
    return found | {"seen": engine.module.seen.clone()}


def keep(engine: Engine, path: Path) -> None:
    state = everything(engine)
    if engine.global_rank == 0:
        torch.save(state, path)


def trains(mesh: Mesh, stage: int, root: Path) -> None:
    """Six steps without a break, with a checkpoint after the third."""
    with open_engine(mesh, stage) as engine:
        train(engine, 3)
        engine.save_checkpoint(root, "third", {"note": 3})
        keep(engine, root.parent / "third.pt")
        train(engine, 3)
        keep(engine, root.parent / "sixth.pt")


def continues(mesh: Mesh, stage: int, root: Path) -> None:
    with open_engine(mesh, stage) as engine:
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


@pytest.mark.parametrize("stage", [1, 3])
def test_a_tensor_parallel_run_continues_on_any_ranks(tmp_path, stage):
    root = tmp_path / "run"
    run_ranks(trains, 4, TP, stage, root)
    assert version(root / "third") == 2
    run_ranks(continues, 4, TP, stage, root)
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
    run_ranks(trains, 4, TP, 3, tmp_path / "run")
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
