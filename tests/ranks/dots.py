"""A model whose gradients are exact in every precision, and the same training in plain PyTorch.

Each element of a gradient is a small integer, so that the rounding of parameters can be followed bit by
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kit
import torch
from kit import DTYPES
from torch import Tensor, nn

import zeroshard

LR, DECAY = 1e-2, 0.1


class Dot(nn.Module):
    """``sum(weight * a) + sum(bias * b)``; sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 7))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, factor: float) -> Tensor:
        a = (torch.arange(91.0).view(13, 7) % 7 - 3) * factor
        b = (torch.arange(5.0) - 2) * factor
        return (self.weight.float() * a).sum() + (self.bias.float() * b).sum()


class Dots(nn.Module):
    """Three dots and a scalar of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.dots = nn.ModuleList(Dot() for _ in range(3))
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, factor: float) -> Tensor:
        total = self.gain.float() * factor
        for dot in self.dots:
            total = total + dot(factor)
        return total


def build(precision: str = "fp32") -> Dots:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Dots().to(DTYPES[precision])


def open_engine(stage: int, precision: str = "fp32", **keys: Any) -> zeroshard.Engine:
    if precision == "fp16":
        keys = {"fp16": {"enabled": True, "loss_scale": 8}, **keys}
    return kit.engine(
        build(precision),
        stage,
        precision,
        optimizer=lambda params: torch.optim.AdamW(params, lr=LR, weight_decay=DECAY),
        **keys,
    )


def factor_of(rank: int, step: int) -> float:
    """Differs between ranks and steps; sums are exact."""
    return float(rank + 1 + step % 3)


def train(engine: zeroshard.Engine, steps: range) -> None:
    for step in steps:
        engine.backward(engine(factor_of(engine.global_rank, step)))
        engine.step()


class Plain:
    """One process, fp32 masters, the mean of all ranks' gradients."""

    def __init__(self, precision: str, world: int) -> None:
        self.dtype, self.world = DTYPES[precision], world
        low = build(precision)
        self.names = [name for name, _ in low.named_parameters()]
        self.masters = build("fp32")
        with torch.no_grad():
            for master, p in zip(self.masters.parameters(), low.parameters(), strict=True):
                master.copy_(p)
        self.optim = torch.optim.AdamW(self.masters.parameters(), lr=LR, weight_decay=DECAY)

    def train(self, steps: range) -> None:
        for step in steps:
            self.optim.zero_grad()
            factors = [factor_of(rank, step) for rank in range(self.world)]
            self.masters(sum(factors) / self.world).backward()
            self.optim.step()

    def train_with(self, step: int, gradients: dict[str, Tensor]) -> None:
        """One step with some gradients replaced."""
        self.optim.zero_grad()
        self.masters(
            sum(factor_of(rank, step) for rank in range(self.world)) / self.world
        ).backward()
        for name, value in gradients.items():
            self.masters.get_parameter(name).grad = value.clone()
        self.optim.step()

    def master(self, name: str) -> Tensor:
        return self.masters.get_parameter(name).data

    def low(self, name: str) -> Tensor:
        return self.master(name).to(self.dtype)

    def state(self, name: str, key: str) -> Tensor:
        return self.optim.state[self.masters.get_parameter(name)][key]

    def edit(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Edit the 16-bit parameter, as programs do. Masters of changed elements get the new values."""
        before = self.low(name)
        after = change(before.clone())
        self.master(name).copy_(torch.where(after == before, self.master(name), after.float()))


def assert_same(engine: zeroshard.Engine, plain: Plain, after: str = "") -> None:
    """Parameters, masters and moments agree; the reductions are exact, the updates nearly so."""
    from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

    params = dict(engine.module.named_parameters())

    def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=2e-6, atol=1e-7, msg=lambda m: f"{after} {what}: {m}"
        )

    seen = dict(engine.iter_full_params())
    assert sorted(seen) == sorted(plain.names)
    for name in plain.names:
        master = safe_get_full_fp32_param(params[name])
        assert master is not None
        assert master.dtype == torch.float32
        assert_close(master, plain.master(name), name)
        assert torch.equal(seen[name], master.to(plain.dtype)), f"{after} {name}"
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(params[name], key)
            assert_close(state, plain.state(name, key), f"{name} {key}")
