"""A small model with the difficult cases of a checkpoint, and functions that collect all of its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard import Engine
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

SAMPLES = 12  # of a global batch: 1, 2, 3 and 4 ranks share it evenly
MOMENTS = ("exp_avg", "exp_avg_sq")


class Small(nn.Module):
    """Tied weights, a frozen part, a scalar, an empty parameter, odd sizes, dropout, buffers."""

    def __init__(self, dropout: float = 0.0, base_seed: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(41, 19)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(19, 53), nn.Tanh(), nn.Dropout(dropout), nn.Linear(53, 19))
            for _ in range(3)
        )
        self.gain = nn.Parameter(torch.tensor(1.3))
        self.nothing = nn.Parameter(torch.zeros(0, 7))
        torch.manual_seed(base_seed)
        self.base = nn.Linear(19, 19).requires_grad_(False)
        self.head = nn.Linear(19, 41, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.base(x) * self.gain + self.nothing.sum())


def config(stage: int, precision: str = "bf16", world_size: int = 1, **keys: Any) -> dict[str, Any]:
    """The caller passes AdamW with two param groups. The schedule shows whether it was restored."""
    zero = {"stage": stage, **keys.pop("zero", {})}
    return {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": SAMPLES // world_size,
        "zero_optimization": zero,
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        "gradient_clipping": 0.5,
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.02},
        },
        "checkpoint": {},
        **keys,
    }


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def open_engine(
    stage: int,
    precision: str = "bf16",
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **keys: Any,
) -> Engine:
    """An engine over :class:`Small` on the current ranks."""
    import torch.distributed as dist

    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model = Small() if model is None else model
    return Engine(
        model,
        config=config(stage, precision, world_size, **keys),
        optimizer=optimizer or torch.optim.AdamW(groups(model), lr=0.02),
    )


def global_batch(step: int) -> Tensor:
    """Token ids ``[SAMPLES, 6]``."""
    return torch.randint(41, (SAMPLES, 6), generator=torch.Generator().manual_seed(100 + step))


def loss_of(engine: Engine, ids: Tensor) -> Tensor:
    """Mean over this rank's part of a global batch."""
    mine = ids.chunk(engine.dp_size)[engine.dp_rank]
    logits = engine(mine).float()
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())


def train(engine: Engine, steps: int) -> list[float]:
    """Train ``steps`` more steps. Returns the losses of this rank."""
    losses = []
    for _ in range(steps):
        loss = loss_of(engine, global_batch(engine.global_steps))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Engine) -> dict[str, Tensor]:
    """All state by name, gathered. Collective."""
    found = {name: values.clone() for name, values in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        if not param.requires_grad:
            continue
        found[f"{name} master"] = safe_get_full_fp32_param(param).clone()
        for key in (*MOMENTS, "step"):
            value = safe_get_full_optimizer_state(param, key)
            if value is not None:
                found[f"{name} {key}"] = value.clone()
    found |= {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    found["lr"] = torch.tensor(engine.get_lr(), dtype=torch.float64)
    return found


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose values differ in any bit, or that only one of them has."""
    return [
        name
        for name in sorted(actual.keys() | expected.keys())
        if name not in actual
        or name not in expected
        or not torch.equal(actual[name], expected[name])
    ]


def stores(path: Path) -> dict[str, dict[str, Any]]:
    """All offload settings, as keys of ``zero_optimization``."""
    disk = {"device": "nvme", "nvme_path": str(path)}
    return {
        "device": {},
        "optimizer on host": {"offload_optimizer": {"device": "cpu"}},
        "optimizer on disk": {"offload_optimizer": disk},
        "all on disk": {"offload_optimizer": disk, "offload_param": disk},
    }
