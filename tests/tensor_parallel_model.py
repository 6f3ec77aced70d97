"""A small tensor-parallel model, and functions that train it and collect its whole state."""

from __future__ import annotations

from typing import Any

import torch
from checkpoint_model import MOMENTS
from kit import config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from zeroshard import Engine
from zeroshard.core.mesh import Mesh
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


def open_engine(mesh: Mesh, stage: int, **keys: Any) -> Engine:
    """An engine on ``mesh``, whose ranks have generators for their samples."""
    model = Model()
    if mesh.tensor > 1:
        sizes = (mesh.dp_size, mesh.tensor)
        devices = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        parallelize_module(model, devices["tensor"], PLAN)
    engine = Engine(
        model,
        config=config(stage, gradient_clipping=0.5, **keys),
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
