"""``PipelineModule`` of two stages, times two data-parallel ranks, trains like plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from support import pipeline_layers as models
from support.pipeline_models import CLIP, COUNT, LR, MICRO_BATCH
from torch import Tensor
from zeroshard_testing import on_ranks

from zeroshard import deepspeed
from zeroshard.deepspeed.pipeline_engine import PipelineEngine
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.deepspeed.topology import PipeDataParallelTopology

STEPS = 4


@functools.cache
def expected() -> tuple[dict[str, Tensor], list[float]]:
    return models.train_plainly(STEPS)


def opened(stage: int, *, keys: dict[str, Any] | None = None, **options: Any) -> PipelineEngine:
    sizes: dict[str, Any] = {"num_stages": 2}
    if "topology" in options:
        sizes = {"topology": PipeDataParallelTopology(*options.pop("topology"))}
    model = PipelineModule(
        models.layers(),
        **{
            **sizes,
            "loss_fn": models.loss_fn,
            "seed_layers": True,
            "base_seed": models.BASE_SEED,
            **options,
        },
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": COUNT,
            "gradient_clipping": CLIP,
            "units": ["Mixed", "Linear"],
            "zero_optimization": {"stage": stage},
            **(keys or {}),
        },
    )
    assert isinstance(engine, PipelineEngine)
    return engine


def check(engine: PipelineEngine) -> None:
    params, losses = expected()
    feed = models.data(STEPS, engine.dp_rank)
    found = [float(engine.train_batch(feed)) for _ in range(STEPS)]
    assert found == pytest.approx(losses, rel=1e-12)
    own = dict(engine.iter_full_params())
    assert 0 < len(own) < len(params)
    for name, value in own.items():
        error = (value - params[name]).abs().max() / params[name].abs().max()
        assert error <= 1e-12, (name, float(error))


VARIANTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (0, {"partition_method": "uniform"}),
    (1, {"partition_method": "type:mixed", "activation_checkpoint_interval": 2}),
    (2, {"topology": (2, 2), "reduce": "step"}),
    (3, {}),
    (3, {"keys": {"pipeline": {"activation_checkpoint_interval": 1}}}),
    (3, {"keys": {"pipeline": {"activation_checkpoint_interval": 2, "use_reentrant": False}}}),
)


@pytest.mark.parametrize(("stage", "options"), VARIANTS)
@on_ranks(4)
def test_four_steps_are_those_of_plain_pytorch(stage, options):
    with opened(stage, **options) as engine:
        check(engine)
