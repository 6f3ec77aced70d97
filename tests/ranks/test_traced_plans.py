"""Tensor plans that come from a run of a small copy of a Transformers model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.fused_models import whole_gradient
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from zeroshard_testing import on_ranks

from zeroshard import initialize
from zeroshard.parallel.tensor_plan import apply_plan

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 51}
SIZES = IDS | {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 16, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0, "type_vocab_size": 2,
}  # fmt: skip
SEQ2SEQ = IDS | {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0,
    "max_position_embeddings": 16, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = IDS | {
    "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
GPTJ = IDS | {
    "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 16, "rotary_dim": 4, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
MODERN = SIZES | {
    "embedding_dropout": 0.0, "mlp_dropout": 0.0, "cls_token_id": 1, "sep_token_id": 2,
    "global_attn_every_n_layers": 2,
}  # fmt: skip

FAMILIES = {
    "bert": ("AutoModelForMaskedLM", SIZES),
    "roberta": ("AutoModelForSequenceClassification", SIZES),
    "modernbert": ("AutoModelForMaskedLM", MODERN),
    "t5": ("AutoModelForSeq2SeqLM", T5),
    "bart": ("AutoModelForSeq2SeqLM", SEQ2SEQ),
    "opt": ("AutoModelForCausalLM", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gptj": ("AutoModelForCausalLM", GPTJ),
    "stablelm": ("AutoModelForCausalLM", SIZES | {"num_key_value_heads": 2}),
    "persimmon": ("AutoModelForCausalLM", SIZES),  # with norms over the features of a head
}


def build(family: str) -> nn.Module:
    """An untrained model in float64, the same in every process."""
    import transformers

    kind, sizes = FAMILIES[family]
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(3)
    model = getattr(transformers, kind).from_config(config, dtype=torch.float64)
    with torch.no_grad():  # zeros and ones would hide a mistake
        for name, param in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                param.add_(torch.randn_like(param), alpha=0.1)
    return model.train()


def inputs(family: str, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 50, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels = ids if family != "roberta" else torch.tensor([0, 1])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_a_family_computes_what_one_process_computes(family):
    plain, cut = build(family), build(family)
    before = torch.random.get_rng_state()
    made = apply_plan(cut, init_device_mesh("cpu", (2,)), "auto").plan
    assert torch.equal(before, torch.random.get_rng_state())
    assert made.source == "structure"
    cut_share = sum(isinstance(p, DTensor) and p.placements[0].is_shard() for p in cut.parameters())
    assert cut_share > len(list(cut.parameters())) // 3
    expected, found = (model(**inputs(family, 1)) for model in (plain, cut))
    assert error_of(found.logits, expected.logits) <= 1e-12
    expected.loss.backward()
    found.loss.backward()
    own = dict(cut.named_parameters())
    for name, param in plain.named_parameters():
        if param.grad is not None:
            assert error_of(whole_gradient(own[name]), param.grad) <= 1e-12, name


@pytest.mark.parametrize("family", ["t5", "opt", "modernbert"])
@on_ranks(4)
def test_a_family_trains_by_autotp_size_on_tensor_and_data_ranks(family):
    plain, model = build(family), build(family)
    settings = {"lr": 1e-2, "eps": 1e-3}  # biases of keys have gradients of 0 but for rounding
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0, **settings)
    norms = []
    for step in range(2):
        for rank in range(2):
            (plain(**inputs(family, 10 * step + rank)).loss / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.05,
        "unit_min_numel": 1,
        "optimizer": {"type": "AdamW", "params": {**settings, "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3},
        "tensor_parallel": {"autotp_size": 2},
    }
    engine, *_ = initialize(model=model, config=config)
    with engine:
        for step in range(2):
            engine.backward(engine(**inputs(family, 10 * step + engine.dp_rank)).loss)
            engine.step()
            assert engine.last_step.grad_norm == pytest.approx(norms[step], rel=1e-12)
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    assert dist.get_world_size() == 2 * engine.dp_size
    for name, param in plain.named_parameters():
        assert error_of(own[name], param) <= 1e-11, name
