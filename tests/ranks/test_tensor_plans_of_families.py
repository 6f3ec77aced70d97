"""Models of Transformers, cut by their own plans, compute what one process computes, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from zeroshard import deepspeed, initialize
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import apply_plan, is_cut
from zeroshard.testing import on_ranks

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 16,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NEOX = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
EXACT = 1e-12


def build(family: str, **sizes: Any) -> nn.Module:
    """An untrained model in float64, the same in every process."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():  # norms begin with ones, which would hide a mistake
        for name, param in model.named_parameters():
            if "norm" in name:
                param.normal_(1.0, 0.1)
    return model.train()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("family", "keys", "cut_embedding"),
    [
        ("llama", {}, True),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, True),
        ("mistral", {}, True),
        ("qwen3", {"tie_word_embeddings": True}, True),
        ("gemma", {}, True),
        ("gemma2", {"query_pre_attn_scalar": 8}, True),
        ("phi3", {}, True),
        ("gpt_neox", {"tie_word_embeddings": True}, True),
    ],
)
@on_ranks(2)
def test_a_family_by_its_own_plan(family, keys, cut_embedding):
    sizes = (NEOX if family == "gpt_neox" else SIZES) | keys
    plain, cut = build(family, **sizes), build(family, **sizes)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = apply_plan(cut, mesh, "auto").plan
    assert made.source == "transformers"
    assert isinstance(cut.get_input_embeddings().weight, DTensor) is cut_embedding
    tied = plain.get_output_embeddings().weight is plain.get_input_embeddings().weight
    assert (cut.get_output_embeddings().weight is cut.get_input_embeddings().weight) is tied
    ids = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    ids[0, :2] = 0  # the padding token
    expected, found = (model(input_ids=ids, labels=ids) for model in (plain, cut))
    assert torch.allclose(found.logits, expected.logits, rtol=0, atol=EXACT)
    assert abs(found.loss.item() - expected.loss.item()) <= EXACT
    expected.loss.backward()
    found.loss.backward()
    own = dict(cut.named_parameters())
    for name, param in plain.named_parameters():
        scale = max(param.grad.abs().max(), 1e-3)
        error = (whole(own[name].grad) - param.grad).abs().max() / scale
        assert error <= EXACT, f"{name}: {error}"


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_a_family_trains_on_tensor_and_data_ranks_as_in_one_process(stage):
    sizes = SIZES | {"tie_word_embeddings": True}
    plain, cut = build("qwen3", **sizes), build("qwen3", **sizes)
    settings = {"lr": 1e-2, "eps": 1e-3}
    optimizer = torch.optim.AdamW(plain.parameters(), **settings)
    norms = []
    for step in range(3):
        for rank in range(2):
            ids = batch(step, rank)
            (plain(input_ids=ids, labels=ids).loss / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    assert deepspeed.tp_model_init(cut, tp_size=2, dtype=torch.float64) is cut
    engine, *_ = initialize(
        model=cut,
        optimizer=torch.optim.AdamW(cut.parameters(), **settings),
        mesh=Mesh(data_shard=2, tensor=2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.05,
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
        },
    )
    with engine:
        for step in range(3):
            ids = batch(step, engine.mesh.dp_rank(dist.get_rank()))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            assert engine.last_step.grad_norm == pytest.approx(norms[step], rel=1e-14)
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in plain.named_parameters():
        error = (own[name] - param).abs().max() / param.abs().max()
        assert error <= EXACT, f"{name}: {error}"


@pytest.mark.parametrize("asks", ["plan", "autotp_size", "optimizer", "model_parameters"])
@on_ranks(2)
def test_the_engine_cuts_a_model_that_is_asked_to_be_cut(asks):
    plain, model = build("llama", **SIZES), build("llama", **SIZES)
    settings = {"lr": 1e-2, "eps": 1e-3}
    adamw = torch.optim.AdamW(plain.parameters(), **settings)
    for step in range(2):
        plain(input_ids=batch(step, 0), labels=batch(step, 0)).loss.backward()
        adamw.step()
        adamw.zero_grad()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
    }
    by_name = {"optimizer": {"type": "AdamW", "params": {**settings, "weight_decay": 1e-2}}}
    options = {
        "plan": {"config": {**config, **by_name, "parallel": {"tensor": 2}}, "plan": "auto"},
        "autotp_size": {"config": {**config, **by_name, "tensor_parallel": {"autotp_size": 2}}},
        "optimizer": {
            "config": {**config, "tensor_parallel": {"autotp_size": 2}},
            "optimizer": torch.optim.AdamW(model.parameters(), **settings),
        },
        "model_parameters": {
            "config": {**config, **by_name, "tensor_parallel": {"autotp_size": 2}},
            "model_parameters": model.parameters(),
        },
    }[asks]
    engine, *_ = initialize(model=model, **options)
    with engine:
        assert is_cut(model)
        assert engine.mesh == Mesh(tensor=2)
        for step in range(2):
            ids = batch(step, 0)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in plain.named_parameters():
        assert (own[name] - param).abs().max() <= EXACT * param.abs().max(), name


@on_ranks(2)
def test_a_plan_for_a_model_that_is_cut_is_refused():
    model = build("llama", **SIZES)
    deepspeed.tp_model_init(model, 2, None)
    config = {"train_micro_batch_size_per_gpu": 2, "parallel": {"tensor": 2}}
    with pytest.raises(UsageError, match=r"plan=\.\.\..*is cut over tensor ranks already"):
        initialize(model=model, config=config, plan="auto")


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(10 * step + rank))


@on_ranks(2)
def test_tp_model_init_says_what_does_not_fit():
    model = build("llama", **SIZES)
    with pytest.raises(UsageError, match=r"tp_size = 3, but 2 rank\(s\) were started"):
        deepspeed.tp_model_init(model, 3, torch.float64)
    with pytest.raises(UnsupportedError, match=r"has the keys \['partition_config'\]"):
        deepspeed.tp_model_init(model, 2, torch.float64, {"partition_config": {}})
    with pytest.raises(UsageError, match="tp_size = 4, but tp_group has 2 ranks"):
        deepspeed.tp_model_init(model, 4, torch.float64, tp_group=dist.group.WORLD)
    assert deepspeed.tp_model_init(model, 1, torch.float32) is model
    assert not is_cut(model)
    assert next(model.parameters()).dtype == torch.float32
    deepspeed.tp_model_init(model, 2, torch.float64, tp_group=dist.group.WORLD)
    assert is_cut(model)
    with pytest.raises(UsageError, match=r"is a DTensor with placements .* been cut already"):
        deepspeed.tp_model_init(model, 2, None)


@on_ranks(4)
def test_fewer_key_value_heads_than_ranks_are_refused():
    mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(
        UsageError, match="has 2 key/value heads of 8 rows, fewer than the 4 tensor"
    ):
        apply_plan(build("llama", **SIZES), mesh, "auto")


@on_ranks(2)
def test_families_without_a_plan_that_fits_are_refused_by_name():
    mesh = init_device_mesh("cpu", (2,))
    gpt2 = build("gpt2", n_layer=2, n_embd=32, n_head=2, vocab_size=50, n_positions=16)
    with pytest.raises(UsageError, match="GPT2LMHeadModel has no plan of Transformers"):
        apply_plan(gpt2, mesh, "auto")
    with pytest.raises(UsageError, match=r"c_attn' is a Conv1D.*stores its weight transposed"):
        apply_plan(gpt2, mesh, {"transformer.h.*.attn.c_attn": "colwise"})
    experts = build("mixtral", num_local_experts=2, **SIZES)
    with pytest.raises(
        UnsupportedError, match=r"cuts 'model.layers.*' by the style 'packed_colwise'"
    ):
        apply_plan(experts, mesh, "auto")
    llama = build("llama", **SIZES)
    with pytest.raises(
        UsageError, match="LlamaForCausalLM is a model of Transformers, and the style"
    ):
        apply_plan(llama, mesh, {"model.norm": "sequence"})
