"""Accelerate's ``ParallelismConfig``: tensor ranks get the same samples, and train as one process."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from programs import forget, with_deepspeed
from torch.utils.data import DataLoader
from zeroshard_testing import on_ranks

from zeroshard.errors import UsageError

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("deepspeed_on_ranks")

CLIP, STEPS, BATCH, DATA = 0.5, 4, 2, 2


def rows(count: int = 40) -> torch.Tensor:
    return torch.randint(3, 50, (count, 8), generator=torch.Generator().manual_seed(1))


def llama() -> Any:
    """A model with a plan of its own, equal in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))


def in_one_process() -> tuple[list[float], list[float]]:
    """Losses and norms of plain PyTorch on the batches of all data ranks."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = iter(DataLoader(rows(), BATCH))
    losses, norms = [], []
    for _ in range(STEPS):
        found = []
        for tokens in itertools.islice(batches, DATA):
            loss = model(input_ids=tokens, labels=tokens).loss / DATA
            loss.backward()
            found.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        losses.append(sum(found))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def train(accelerator: Any) -> tuple[Any, list[float], list[float]]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), BATCH))
    losses, norms = [], []
    for tokens in itertools.islice(loader, STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return model, losses, norms


def with_plugin(stage: int, **sizes: int) -> Any:
    """Accelerate's own Accelerator, with its plug-in for DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin
    from accelerate.parallelism_config import ParallelismConfig

    forget()
    os.environ.pop("ACCELERATE_USE_CPU", None)
    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=CLIP)
    # with tensor ranks Accelerate cannot take it from the loader
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
    return Accelerator(deepspeed_plugin=plugin, parallelism_config=ParallelismConfig(**sizes))


def by_name(stage: int, config: dict[str, Any] | None = None, **sizes: int) -> Any:
    """ZeroShard's Accelerator."""
    from accelerate.parallelism_config import ParallelismConfig

    from zeroshard.integrations.accelerate import Accelerator

    forget()
    zero = {"zero_optimization": {"stage": stage}, "unit_min_numel": 1, **(config or {})}
    asked = ParallelismConfig(**sizes) if sizes else None
    return Accelerator(cpu=True, config=zero, parallelism_config=asked)


def check(accelerator: Any, mesh: str) -> None:
    wanted_losses, wanted_norms = in_one_process()
    model, losses, norms = train(accelerator)
    assert model.mesh.text == mesh
    assert model.train_micro_batch_size_per_gpu() == BATCH
    assert model.train_batch_size() == BATCH * DATA
    assert losses == pytest.approx(wanted_losses, rel=2e-5)
    assert norms == pytest.approx(wanted_norms, rel=2e-5)
    assert min(norms) > CLIP
    model.destroy()


@pytest.mark.parametrize("kind", [with_plugin, by_name])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4, group=False, timeout=120)
@with_deepspeed
def test_tensor_ranks_get_the_same_samples_and_train_as_one_process(stage, kind):
    check(kind(stage, tp_size=2, dp_shard_size=DATA), "data_shard 2 x tensor 2")


@pytest.mark.parametrize("kind", [with_plugin, by_name])
@on_ranks(2, group=False, timeout=120)
@with_deepspeed
def test_replicas_alone_are_plain_data_parallelism(kind):
    check(kind(2, dp_replicate_size=2), "data_shard 2")


@on_ranks(2, group=False, timeout=120)
@with_deepspeed
def test_what_does_not_fit_is_refused():
    with pytest.raises(UsageError, match=r"autotp_size: 2, .*=ParallelismConfig\(tp_size"):
        train(by_name(1, {"tensor_parallel": {"autotp_size": 2}}))
    with pytest.raises(Exception, match=r"tensor: .* is 1, but ParallelismConfig.tp_size is 2"):
        train(by_name(1, {"parallel": {"tensor": 1}}, tp_size=2))
    with pytest.raises(
        UsageError, match=r"sp_size=2, tp_size=2\): with sequence ranks the loaders"
    ):
        by_name(1, sp_size=2, tp_size=2)
    with pytest.raises(
        UsageError, match=r"sequence_parallel_size: 2, .*=ParallelismConfig\(tp_size"
    ):
        by_name(1, {"sequence_parallel_size": 2})
    with pytest.raises(Exception, match=r"cp_size 2, which means ring attention"):
        train(by_name(1, cp_size=2))
