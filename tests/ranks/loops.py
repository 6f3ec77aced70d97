"""Shared by the tests of the engine's calls: a small model, its data, and training loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import kit
import torch
from support.edge_case_models import BATCH, CASES, mse
from support.parity import cast_batch, make_batches
from torch import Tensor, nn

import zeroshard

CASE = CASES["mlp"]
STAGES = (0, 1, 2, 3)


def config_for(stage: int = 0, **keys: Any) -> dict[str, Any]:
    return kit.config(stage, **{"train_micro_batch_size_per_gpu": BATCH, **keys})


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def open_engine(
    stage: int = 0,
    *,
    model: nn.Module | None = None,
    optimizer: Any = adamw,
    **keys: Any,
) -> zeroshard.Engine:
    """An engine over a fresh model; ``optimizer`` may be a section. The caller closes it."""
    keys = {"train_micro_batch_size_per_gpu": BATCH, "optimizer": optimizer, **keys}
    return kit.engine(CASE.build() if model is None else model, stage, **keys)


def data(steps: int, micros: int = 1, *, rank: int = 0, world: int = 1, seed: int = 0) -> list[Any]:
    """``[step][micro]`` -> this rank's batch."""
    batches = make_batches(CASE, steps=steps, world=world, accumulation=micros, seed=seed)
    return [[ranks[rank] for ranks in micros_] for micros_ in batches]


def own_data(engine: zeroshard.Engine, steps: int, micros: int = 1, seed: int = 0) -> list[Any]:
    """This rank's batches in the dtype of the engine's parameters."""
    mine = data(steps, micros, rank=engine.dp_rank, world=engine.dp_size, seed=seed)
    dtype = engine.policy.param or torch.float32
    return [[cast_batch(batch, dtype) for batch in micros_] for micros_ in mine]


def loss_of(forward: Any, batch: tuple[Tensor, ...]) -> Tensor:
    return mse(forward, batch)


def train(engine: zeroshard.Engine, steps: list[Any]) -> None:
    """The plain loop: ``step()`` after every micro-batch."""
    for micros in steps:
        for batch in micros:
            engine.backward(loss_of(engine, batch))
            engine.step()


def weights(engine: zeroshard.Engine) -> dict[str, Tensor]:
    """A private copy of all parameters. Collective."""
    return {name: full.clone() for name, full in engine.iter_full_params()}


def trained(stage: int, steps: int = 3, micros: int = 1, **options: Any) -> dict[str, Tensor]:
    """Parameters after the plain loop."""
    keys = {"gradient_accumulation_steps": micros, **options}
    with open_engine(stage, **keys) as engine:
        train(engine, own_data(engine, steps, micros))
        return weights(engine)


def plain(
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
    *,
    steps: int = 3,
    micros: int = 1,
    world: int = 1,
    model: nn.Module | None = None,
    clip: float = 0.0,
) -> dict[str, Tensor]:
    """The same training in plain PyTorch: one process, the global batch."""
    model = CASE.build() if model is None else model
    optimizer = make_optimizer(model.parameters())
    for batches in make_batches(CASE, steps=steps, world=world, accumulation=micros):
        for ranks in batches:
            for batch in ranks:
                (loss_of(model, batch) / (micros * world)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different, f"differ: {different}"


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float = 1e-5
) -> None:
    """Relative to the largest element of each tensor."""
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        error = (actual[name].double() - wanted.double()).abs().max().item()
        limit = rtol * wanted.abs().max().item()
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e}"


class Explode(torch.autograd.Function):
    """``x``, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return torch.full_like(grad, torch.inf)
