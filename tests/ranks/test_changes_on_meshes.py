"""Simulated changes of runs with pipeline and tensor ranks: each fits when the run is changed so."""

from __future__ import annotations

from typing import Any

import kit
import pytest
import torch
import torch.distributed as dist
from support.remedies import Block, Limited, applied
from torch import Tensor, nn

from zeroshard import Engine
from zeroshard.deepspeed.layer_specs import LayerSpec
from zeroshard.deepspeed.pipeline_module import PipelineModule
from zeroshard.engine import simulated_changes
from zeroshard.engine.simulated_changes import Answer, ask
from zeroshard.parallel import pipeline, tensor_parallel
from zeroshard.parallel.tensor_plan import neighbours
from zeroshard.testing import on_ranks

WIDTH, DEPTH, ROWS, LENGTH, VOCABULARY = 32, 8, 1024, 16, 96
PLAN = {"*.up": "colwise", "*.down": "rowwise"}
HALF = '{"train_micro_batch_size_per_gpu": %d, "gradient_accumulation_steps": 4}'
CALL = "model.gradient_checkpointing_enable()"
INTERVAL = '{"pipeline": {"activation_checkpoint_interval": 1}}'

RUNS = {
    "layers": ("pipeline", ROWS, [HALF % (ROWS // 2), INTERVAL]),
    "llama in stages": ("pipeline", 64, [HALF % 32, CALL]),
    "plan": ("tensor", ROWS, [HALF % (ROWS // 2)]),
    "llama cut before": ("tensor", 64, [HALF % 32, CALL]),
}
"""The dimension of the mesh, rows of a micro-batch, and changes with which rank 0 fits."""

PART = 0.75
"""Of the peak, for which rank 0 has memory."""


def mean_square(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def loss_of(engine: Engine, batch: Any) -> Tensor:
    """No output is kept, as in a simulation."""
    loss: Tensor = (
        engine(**batch).loss if isinstance(batch, dict) else mean_square(engine(batch[0]), batch[1])
    )
    return loss


def llama(line: str | None) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    applied(line if line == CALL else None, {}, model)
    return model.train()


def built(kind: str, line: str | None) -> tuple[nn.Module, dict[str, str] | None]:
    """The model with the change ``line``, if that is a call, and the plan for the engine."""
    torch.manual_seed(0)
    if kind == "layers":
        specs = [LayerSpec(Block, WIDTH) for _ in range(DEPTH)]
        return PipelineModule(specs, num_stages=2, loss_fn=mean_square), None
    if kind == "llama in stages":
        return pipeline(llama(line), split=["model.layers.2"]), None
    if kind == "plan":
        return nn.Sequential(*(Block(WIDTH) for _ in range(DEPTH))), PLAN
    return tensor_parallel(llama(line), neighbours(2), "auto"), None


def trained(kind: str, line: str | None, memory: Limited, part: float = 0.0) -> Answer:
    """Two steps with one change. ``part``: ask for changes with which so much of the peak is enough."""
    dim, rows, _ = RUNS[kind]
    config = kit.config(
        1,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
        train_micro_batch_size_per_gpu=rows,
        gradient_accumulation_steps=2,
        transport="p2p",
        parallel={dim: 2},
        trust={"simulate_changes_s": 240},
    )
    config = applied(line if line != CALL else None, config, nn.Module())
    rows, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    with memory:
        model, plan = built(kind, line)
        for param in model.parameters():
            if not hasattr(param, "placements"):
                param.data = param.data.clone()  # memory is followed from here on
        if "llama" in kind:
            ids = torch.ones(rows, LENGTH, dtype=torch.long)
            batch: Any = {"input_ids": ids, "labels": ids}
        else:
            x = torch.ones(rows, WIDTH)
            batch = x, x
        with Engine(model, config=config, plan=plan) as engine:
            for _ in range(2):
                if dim == "pipeline":
                    engine.train_batch(iter([batch] * steps))
                    continue
                for _ in range(steps):
                    engine.backward(loss_of(engine, batch))
                    engine.step()
            return ask(engine, int(part * memory.peak), 1000) if part else Answer()


@pytest.mark.parametrize("kind", RUNS)
@on_ranks(2, timeout=400)
def test_each_simulated_change_makes_the_rank_fit(kind):
    simulated_changes.asked[:] = [1] * dist.get_rank()  # rank 0 asks
    free = Limited()
    answer = trained(kind, None, free, PART)
    given = [answer]
    dist.broadcast_object_list(given)
    (answer,) = given
    assert [each.line for each in answer.changes] == RUNS[kind][2], answer
    for change in answer.changes:
        memory = Limited(PART * free.peak if dist.get_rank() == 0 else float("inf"))
        trained(kind, change.line, memory)
        if dist.get_rank() == 0:
            freed = free.peak - memory.peak
            assert abs(change.freed_nbytes - freed) < 0.02 * free.peak, (change, freed)
