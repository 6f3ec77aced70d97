"""Weights that are tied over pipeline stages train like plain PyTorch in one process."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from support import pipeline_models as models
from support.covering import each_value
from torch import Tensor, nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.parallel import pipeline

STEPS = 4
PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
SPLITS = {1: ["layers.3"], 2: ["layers.1", "layers.3", "layers.5"]}
TIED = {"embed.weight", "layers.0.up.weight"}
WHEN = ("micro_batch", "step")
SETTINGS = [
    (schedule, stage, gather, reduce, recompute)
    for schedule, stage, gather, reduce, recompute in itertools.product(
        PER_RANK, (0, 1, 2, 3), WHEN, WHEN, (False, True)
    )
    if (gather == "micro_batch" or stage == 3) and (reduce == "micro_batch" or stage >= 2)
]


def cut(
    model: nn.Module, schedule: str = "1F1B", split: list[str] | None = None, **keys: Any
) -> Any:
    return pipeline(
        model,
        split=split or SPLITS[PER_RANK[schedule]],
        order=models.ORDER,
        loss_fn=models.loss_fn,
        schedule=schedule,
        **keys,
    )


def decoder(recompute: bool = False) -> nn.Module:
    return models.Decoder(recompute, tied=True).double()


@functools.cache
def expected(dp_size: int) -> tuple[dict[str, Tensor], list[float], list[float]]:
    return models.train_plainly(STEPS, tied=True, dp_size=dp_size)


def check_training(engine: Engine) -> None:
    params, plain_losses, plain_norms = expected(engine.dp_size)
    feed, losses, norms = models.data(STEPS, engine.dp_rank), [], []
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(feed)))
        norms.append(float(engine.last_step.grad_norm))
    assert losses == pytest.approx(plain_losses, rel=1e-12)
    assert norms == pytest.approx(plain_norms, rel=1e-14)
    for name, value in engine.iter_full_params():
        error = (value - params[name]).abs().max() / params[name].abs().max()
        assert error <= 1e-12, (name, float(error))


def held_alike(engine: Engine) -> set[str]:
    """The parameters that this rank shares with all others, after a check that they have equal bits."""
    values = {name: value.clone() for name, value in engine.iter_full_params() if name in TIED}
    flat = torch.cat([values[name].flatten() for name in sorted(values)])
    rows = engine._watch.world.all_gather_small(flat, name="test")
    assert torch.equal(rows, rows[:1].expand_as(rows))
    return set(values)


@pytest.mark.parametrize(
    ("schedule", "stage", "gather", "reduce", "recompute"), each_value(SETTINGS)
)
@on_ranks(4)
def test_tied_weights_train_like_plain_pytorch(schedule, stage, gather, reduce, recompute):
    """With several stages per rank, both stages of the second tie are on pipeline rank 0."""
    model = cut(decoder(recompute), schedule, gather=gather, reduce=reduce)
    keys = models.config(stage, parallel={"pipeline": 2})
    with Engine(model, config=keys, optimizer=models.adamw) as engine:
        check_training(engine)
        if PER_RANK[schedule] == 1:
            assert held_alike(engine) == TIED


class Scales(nn.Module):
    """Two parameters without children, of which the first stage uses one and the last stage the other."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.Parameter(torch.rand(models.WIDTH) + 1) for _ in range(2))


class Scaled(models.Decoder):
    """Has a forward of its own, which reads parameters of the model and of a module outside its blocks.

    The head is tied to the embedding, and its bias is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.shift = Scales(), nn.Parameter(torch.randn(models.WIDTH))
        self.head = nn.Linear(models.WIDTH, models.VOCABULARY)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) * self.scales.before + self.shift
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x * self.scales.after))
        return logits


def scaled() -> nn.Module:
    torch.manual_seed(3)
    return Scaled().double()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_parameters_outside_the_blocks_train_like_plain_pytorch(stage):
    plain = scaled()
    optimizer = models.adamw(plain.parameters())
    part = pipeline(
        scaled(),
        split=["layers.3"],
        loss_fn=models.loss_fn,
        example={"tokens_BT": models.batches(0, 0)[0][0]},
    )
    feed = models.data(STEPS, 0)
    config = models.config(stage, parallel={"pipeline": 2})
    with Engine(part, config=config, optimizer=models.adamw) as engine:
        for step in range(STEPS):
            batches = models.batches(step, 0)
            loss = torch.stack([models.loss_fn(plain(x), y) for x, y in batches]).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), models.CLIP)
            optimizer.step()
            assert float(engine.train_batch(feed)) == pytest.approx(loss.item(), rel=1e-12)
        params = dict(plain.named_parameters())
        for name, value in engine.iter_full_params():
            assert torch.allclose(value, params[name], rtol=0, atol=1e-11), name
