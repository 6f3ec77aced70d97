"""A small engine whose four ranks are on two nodes of two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from kit import config

import zeroshard
from zeroshard.zero import safe_get_full_optimizer_state

KEYS: Mapping[str | None, dict[str, Any]] = {
    None: {},
    "hpz": {"zero_hpz_partition_size": 2},
    "two hops": {"hierarchy": {"inner": 2}},
    "hybrid": {"hierarchy": {"inner": 2, "shard_over": "hybrid"}},
    "replicas": {"hierarchy": {"inner": 2, "shard_over": "inner"}},
    "boundary": {"hierarchy": {"inner": 2, "outer_reduce": "boundary"}},
    "hybrid boundary": {
        "hierarchy": {"inner": 2, "shard_over": "hybrid", "outer_reduce": "boundary"}
    },
    "replicas boundary": {
        "hierarchy": {"inner": 2, "shard_over": "inner", "outer_reduce": "boundary"}
    },
}
"""Keys of ``zero_optimization``; None: one hop."""


def opened(
    stage: int, keys: str | None, *, frozen: str | None = None, **more: Any
) -> zeroshard.Engine:
    """An engine on the CPU. ``frozen``: a layer. ``more``: further keys of the configuration."""
    torch.manual_seed(dist.get_rank())  # rank 0's parameters are used
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    if frozen is not None:
        model.get_submodule(frozen).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zero = more.pop("zero_optimization", {})
    made = config(stage, **more)
    made["zero_optimization"].update(KEYS[keys], **zero)
    return zeroshard.Engine(model, config=made, optimizer=optimizer)


def step(engine: zeroshard.Engine, seed: int = 0, micro_batches: int = 1) -> float:
    """Train one step on samples of this rank. Returns the norm of the gradient."""
    dtype = next(engine.module.parameters()).dtype
    for at in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * seed + 10 * at + engine.dp_rank)
        inputs = torch.randn(5, 16, generator=generator).to(dtype)
        engine.backward(engine(inputs).float().square().mean())
        engine.step()
    assert engine.last_step is not None
    return float(engine.last_step.grad_norm)


def bits_of(engine: zeroshard.Engine) -> list[list[float]]:
    """The values of all parameters."""
    return [value.float().flatten().tolist() for _, value in engine.iter_full_params()]


def values_of(engine: zeroshard.Engine) -> dict[str, torch.Tensor]:
    """Everything that training continues from, by name."""
    found = {name: p.detach().clone() for name, p in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(param, key)
            assert state is not None
            found[f"{key} of {name}"] = state
    return found
