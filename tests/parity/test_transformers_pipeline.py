"""Models of Transformers train as pipelines like the plain model in one process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.covering import sampled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.errors import UnsupportedError
from zeroshard.parallel import pipeline, tensor_parallel

STEPS, COUNT, LR, CLIP, WORDS = 4, 4, 1e-2, 0.05, 32
COMMON = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
}
EXTRA = {
    "gpt2": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 4,
        "n_positions": 16,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    # Its blocks return attention weights too.
    "bloom": {"n_head": 2, "n_layer": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    # Reads the embedding's device, on all stages.
    "llama4_text": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
}
SPLITS = {"1F1B": ["2"], "LoopedBFS": ["1", "2", "3"]}


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**COMMON, **EXTRA.get(family, {})})
    config._experts_implementation = "eager"  # the other one has no fp64
    model = AutoModelForCausalLM.from_config(config).double()
    for module in model.modules():
        if type(module).__name__ in ("LlamaRMSNorm", "Qwen3RMSNorm"):
            module.forward = functools.partial(exact_norm, module)
    return model


def exact_norm(module: nn.Module, x: Tensor) -> Tensor:
    """The models' own forward computes in fp32, where a last bit that differs becomes 1e-8."""
    return module.weight * (x * torch.rsqrt(x.square().mean(-1, True) + module.variance_epsilon))


def batches(step: int, dp_rank: int) -> list[dict[str, Tensor]]:
    """As a collator makes them: padded, with a mask and labels."""
    made = torch.Generator().manual_seed(1000 * step + dp_rank)
    tokens = torch.randint(1, WORDS, (COUNT, 2, 6), generator=made)
    mask = torch.ones_like(tokens)
    mask[:, 1, 4:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    keys = ("input_ids", "attention_mask", "labels")
    return [dict(zip(keys, each, strict=True)) for each in zip(tokens, mask, labels, strict=True)]


def loss_of(output: Any, labels: Tensor) -> Tensor:
    """The models' own loss in fp64. Theirs is in fp32."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    given = {name: value for name, value in batch.items() if name != "labels"}
    return loss_of(model(**given), batch["labels"])


@functools.cache
def expected(
    family: str, data_ranks: int = 2
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        every = [batch for rank in range(data_ranks) for batch in batches(step, rank)]
        loss = torch.stack([plain_loss(model, batch) for batch in every]).mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {name: p.detach() for name, p in model.named_parameters()}, losses, norms


def cut(model: nn.Module, schedule: str) -> Any:
    blocks = "transformer.h" if hasattr(model, "transformer") else "model.layers"
    split = [f"{blocks}.{at}" for at in SPLITS[schedule]]
    return pipeline(model, split=split, schedule=schedule, loss_fn=loss_of)


def config(stage: int, **keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": CLIP,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        **keys,
    }


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR)


@pytest.mark.parametrize(
    ("family", "stage", "schedule", "recompute"),
    sampled(
        [
            ("llama", 3, "1F1B", True),
            ("qwen3", 2, "LoopedBFS", False),
            ("gemma", 3, "LoopedBFS", False),
            ("gpt2", 1, "1F1B", False),
            ("bloom", 2, "1F1B", True),
            ("llama4_text", 3, "1F1B", False),
            ("mixtral", 1, "LoopedBFS", True),
            ("gpt2", 3, "LoopedBFS", True),
        ],
        every=3,
    ),
)
@on_ranks(4)
def test_models_train_like_the_plain_model(family, stage, schedule, recompute, tmp_path: Path):
    model = build(family)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    keys = config(stage, parallel={"pipeline": 2})
    check(family, Engine(cut(model, schedule), config=keys, optimizer=adamw), tmp_path)


def check(family: str, engine: Engine, tmp_path: Path) -> None:
    """Train, compare with the plain model, and load the checkpoint into a plain model."""
    ranks = engine.dp_size
    params, losses, norms = expected(family, ranks)
    with engine:
        assert engine.module.ties
        for step in range(STEPS):
            made = batches(step, engine.dp_rank)
            assert float(engine.train_batch(iter(made))) == pytest.approx(losses[step], rel=1e-12)
            assert float(engine.last_step.grad_norm) == pytest.approx(norms[step], rel=1e-14)
        for name, value in engine.iter_full_params():
            error = (value - params[name]).abs().max() / params[name].abs().max()
            assert error <= 1e-12, (name, float(error))
        last = float(engine.eval_batch(iter(batches(9, engine.dp_rank))))
        engine.save_checkpoint(tmp_path)
    plain = config(0, gradient_accumulation_steps=1)
    with Engine(build(family), config=plain, optimizer=adamw) as alone:
        alone.load_checkpoint(tmp_path)
        seen = []
        for rank in range(ranks):
            for batch in batches(9, rank):
                with torch.no_grad():
                    seen.append(float(plain_loss(alone, batch)))
        assert last == pytest.approx(sum(seen) / len(seen), rel=1e-12)


def tensor_ranks() -> Any:
    shape = (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("others", "tensor"))["tensor"]


@pytest.mark.parametrize(
    ("family", "stage", "schedule"),
    sampled([("llama", 3, "1F1B"), ("qwen3", 1, "LoopedBFS"), ("gpt2", 2, "1F1B")], every=3),
)
@on_ranks(4)
def test_models_that_are_cut_over_tensor_ranks_train_like_the_plain_model(
    family, stage, schedule, tmp_path: Path
):
    """A single key/value head is shared by both tensor ranks; projections are fused; weights are tied."""
    model = tensor_parallel(build(family), tensor_ranks())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    keys = config(stage, parallel={"pipeline": 2, "tensor": 2})
    check(family, Engine(cut(model, schedule), config=keys, optimizer=adamw), tmp_path)


@on_ranks(8)
def test_a_pipeline_is_cut_over_tensor_ranks_by_its_configuration(tmp_path: Path):
    """The plan names layers of all stages, so it is applied before other stages are deleted."""
    asked = {"parallel": {"pipeline": 2}, "tensor_parallel": {"autotp_size": 2}}
    model = cut(build("llama"), "LoopedBFS")
    check("llama", Engine(model, config=config(3, **asked), optimizer=adamw), tmp_path)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
@on_ranks(2)
def test_a_model_in_fp32_trains_in_16_bit(precision, dtype):
    """Stages without the embedding take its place with zeros, which decide the dtype of positions."""
    sizes = {**COMMON, "tie_word_embeddings": False}

    def untied() -> Any:
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes))

    plain, every = untied().to(dtype), batches(0, 0)
    with torch.no_grad():
        expected_loss = float(torch.stack([plain(**batch).loss for batch in every]).double().mean())
    model = pipeline(untied(), split=["model.layers.2"])
    settings = config(3, **{precision: {"enabled": True}}, parallel={"pipeline": 2})
    with Engine(model, config=settings, optimizer=adamw) as engine:
        first, second = (float(engine.train_batch(iter(every))) for _ in range(2))
        if precision == "bf16":  # fp16 may skip its first steps
            assert second < first
    assert first == pytest.approx(expected_loss, rel=1e-5)


@on_ranks(2)
def test_what_other_programs_or_sequences_cut_cannot_be_followed():
    mesh = init_device_mesh("cpu", (2,))
    foreign = build("llama")
    parallelize_module(foreign, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
    with pytest.raises(
        UnsupportedError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is a DTensor"
    ):
        cut(foreign, "1F1B")
    model = Plain()
    tensor_parallel(model, mesh, {"norm": "sequence", "layers.*": "replicate"})
    with pytest.raises(UnsupportedError, match=r"'norm' is cut.* over the sequence"):
        pipeline(model, split=["layers.1"], example={"x": torch.zeros(1, 4, 4)}, loss_fn=loss_of)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(self.norm(x))
        return x


@on_ranks(2)
def test_a_model_on_the_meta_device_gets_the_values_of_its_own_initialisation():
    """Norms begin with ones, embeddings with the configuration's range, rotary buffers with theirs."""
    with torch.device("meta"):
        model = build("llama")
    whole = build("llama")
    with Engine(
        cut(model, "LoopedBFS"), config=config(3, parallel={"pipeline": 2}), optimizer=adamw
    ) as engine:
        buffers = dict(engine.module.named_buffers())
        assert torch.equal(
            buffers["model.rotary_emb.inv_freq"].double(), whole.model.rotary_emb.inv_freq.double()
        )
        for name, value in engine.iter_full_params():
            if "norm" in name:
                assert torch.equal(value, torch.ones_like(value)), name
            elif "embed" in name:
                assert 0.015 < float(value.std()) < 0.025
            else:
                assert 0.01 < float(value.std()) < 0.03, name
        assert not engine.train_batch(iter(batches(0, engine.dp_rank))).isnan()
