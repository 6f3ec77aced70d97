"""Pipeline 2 x data 2 x tensor 2 on eight ranks: plain PyTorch's numbers at every stage of ZeRO."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.covering import sampled
from support.tensor_networks import CLIP, LENGTH, WORDS, network
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_plan import neighbours

STEPS, MICRO_BATCHES = 4, 4
MESH = Mesh(pipeline=2, data_shard=2, tensor=2)


def build() -> nn.Sequential:
    model = network(32, torch.float64)
    return nn.Sequential(model.emb, *model.blocks, model.head)


def samples(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, WORDS, (MICRO_BATCHES * 2 * 2, LENGTH), generator=generator)


def loss_of(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.roll(-1, 1).flatten())


def plain_training() -> tuple[dict[str, Tensor], list[float]]:
    model, norms = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        words = samples(step)
        loss_of(model(words), words).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def engine_at(stage: int, schedule: str, split: list[str]) -> zeroshard.Engine:
    model = build()
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in list(model)[1:-1]:
        parallelize_module(block, neighbours(2), plan)
    model = zeroshard.parallel.pipeline(model, split=split, loss_fn=loss_of, schedule=schedule)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}},
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
    }
    return zeroshard.Engine(model, config=config, mesh=MESH)


def micro_batches(step: int, share: int) -> list[tuple[Tensor, Tensor]]:
    return [(part, part) for part in samples(step).chunk(2)[share].chunk(MICRO_BATCHES)]


@pytest.mark.parametrize(
    ("stage", "schedule", "split"),
    sampled(
        [
            (3, "Interleaved1F1B", ["1", "2", "3"]),
            *((stage, "1F1B", ["2"]) for stage in range(4)),
        ],
        every=2,
    ),
)
@on_ranks(8, timeout=120)
def test_four_steps_are_those_of_one_plain_process(stage, schedule, split, tmp_path):
    expected, norms = plain_training()
    with engine_at(stage, schedule, split) as engine:
        for step in range(STEPS):
            engine.train_batch(iter(micro_batches(step, engine.dp_rank)))
            assert float(engine.last_step.grad_norm) == pytest.approx(norms[step], rel=1e-14)
        found = {name: value.clone() for name, value in engine.iter_full_params()}
        engine.save_checkpoint(str(tmp_path))
        for name, value in found.items():
            error = (value - expected[name]).abs().max() / expected[name].abs().max()
            assert error <= 1e-12, f"{name}: {error}"
    with zeroshard.Engine(build(), config=alone(stage)) as engine:  # another mesh
        engine.load_checkpoint(str(tmp_path))
        loaded = dict(engine.iter_full_params())
        assert all(torch.equal(loaded[name], value) for name, value in found.items())


def alone(stage: int) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
    }


@on_ranks(8, timeout=120)
def test_other_samples_in_a_tensor_group_of_a_pipeline_are_an_error():
    with engine_at(2, "1F1B", ["2"]) as engine:
        share = engine.global_rank % 2
        with pytest.raises(UsageError, match="ranks of a tensor group got different gradients"):
            engine.train_batch(iter(micro_batches(0, share)))
