"""One optimizer step: what an optimizer counts advances once, and hooks run once, wherever state is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from loops import CASE
from support.parity import engine_run, make_batches, reference_run
from torch import Tensor


class Warm(torch.optim.AdamW):
    """Counts its steps, and sets the learning rate from the count. Its ``step`` is not AdamW's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2, eps=1e-3, fused=True)
        self.count = 0
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.seen.append(self.count)
        for group in self.param_groups:
            group["lr"] = 1e-3 * min(self.count, len(self.seen))
        super().step()


class Averaged(torch.optim.Optimizer):
    """Schedule-free SGD: counts in the group, with an option that the first step makes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            k = group["k"] = group.get("k", 0) + 1
            total = group["total"] = group.get("total", torch.zeros(())) + k**2
            share, beta, lr = float(k**2 / total), group["beta"], group["lr"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, share)
                p.add_(p.grad, alpha=-lr * (1 - beta * (1 - share)))
                z.sub_(p.grad, alpha=lr)

    @torch.no_grad()
    def eval(self) -> None:
        self._move(1 - 1 / 0.9, training=False)

    @torch.no_grad()
    def train(self) -> None:
        self._move(1 - 0.9, training=True)

    def _move(self, share: float, *, training: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.data.lerp_(self.state[p]["z"], share)
                group["train_mode"] = training


def hooked(params: Any) -> torch.optim.Optimizer:
    """Plain AdamW with a Lookahead of two steps in a hook, and counters."""
    optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True)
    slow: dict[Tensor, Tensor] = {}
    steps: list[int] = []

    def look(inner: Any, args: Any, kwargs: Any) -> None:
        assert inner is optimizer
        steps.append(len(steps))
        with torch.no_grad():
            for p in [p for group in inner.param_groups for p in group["params"]]:
                here = slow.setdefault(p, p.clone())
                if len(steps) % 2 == 0:
                    p.copy_(here.lerp_(p, 0.5))

    def warm(inner: Any, args: Any, kwargs: Any) -> None:
        inner.param_groups[0]["lr"] *= 1.1

    optimizer.register_step_post_hook(look)
    optimizer.register_step_pre_hook(warm)
    return optimizer


KINDS = {"Warm": Warm, "Averaged": Averaged}
STEPS = 4
PLACES = [
    (0, ""),
    (1, ""),
    (2, ""),
    (3, ""),
    (1, "cpu"),
    (1, "nvme"),
    (2, "nvme"),
    (3, "cpu"),
    (3, "nvme"),
]


def offload(where: str, folder: Path, stage: int) -> dict[str, Any]:
    if not where:
        return {}
    place = {"device": where} | ({"nvme_path": str(folder)} if where == "nvme" else {})
    params = {"offload_param": place} if stage == 3 and where == "nvme" else {}
    return {"zero_optimization": {"offload_optimizer": place, **params}}


def over(make: Any) -> Any:
    return lambda named: make([param for _, param in named])


def compare(make: Any, world: int, folder: Path, *, precision: Any = "fp64") -> None:
    """At every stage, and with every offload, as in plain PyTorch."""
    batches = make_batches(CASE, steps=STEPS, world=world)
    wanted = reference_run(CASE, over(make), batches, precision=precision)
    for stage, where in PLACES:
        config = offload(where, folder, stage)
        run = engine_run(CASE, over(make), batches, stage=stage, precision=precision, config=config)
        for name, value in wanted.params.items():
            error = (run.params[name] - value).abs().max().item()
            most = 1e-12 if precision == "fp64" and world > 1 else 0.0
            assert error <= most, (stage, where, name, error)
