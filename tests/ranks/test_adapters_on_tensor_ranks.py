"""Models of Transformers with LoRA, cut over tensor ranks: the plain model's numbers, or an error."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from zeroshard_testing import on_ranks

from zeroshard import initialize
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.parallel.tensor_plan import decide

SIZES = {
    "vocab_size": 51, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 16,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "zero_optimization": {"stage": 2},
    "tensor_parallel": {"autotp_size": 2},
}


def build(heads: int = 2) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.AutoConfig.for_model("llama", num_key_value_heads=heads, **SIZES)
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def with_lora(model: nn.Module, targets: Any = "all-linear", **keys: Any) -> nn.Module:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(4)
    found = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, **keys))
    for name, param in found.named_parameters():
        if "lora_" in name:  # B begins with zeros, which would hide a mistake
            param.data = torch.randn(param.shape, dtype=torch.float64) / 4
    return found


def refused(model: nn.Module) -> str:
    with pytest.raises(UnsupportedError) as caught:
        decide(model, 2, "auto")
    return str(caught.value)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "o_proj", "lm_head"]])
@on_ranks(2)
def test_adapters_train_as_in_one_process(targets):
    plain, model = with_lora(build(), targets), with_lora(build(), targets)
    trained = [param for param in plain.parameters() if param.requires_grad]
    adamw = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    own = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    engine, *_ = initialize(model=model, optimizer=own, config=CONFIG)
    with engine:
        for step in range(3):
            ids = torch.randint(51, (2, 9), generator=torch.Generator().manual_seed(step))
            expected = plain(input_ids=ids, labels=ids).loss
            expected.backward()
            adamw.step()
            adamw.zero_grad()
            loss = engine(input_ids=ids, labels=ids).loss
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
            engine.backward(loss)
            engine.step()
        names = dict(plain.named_parameters())
        cut = {name for name, param in model.named_parameters() if isinstance(param, DTensor)}
        assert any("q_proj.lora_B" in name for name in cut)
        assert any("o_proj.lora_A" in name for name in cut)
        for name, full in engine.iter_full_params():
            assert torch.allclose(full, names[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    ("targets", "keys", "why"),
    [
        ("all-linear", {"lora_dropout": 0.1}, "layers.0.self_attn.q_proj.*lora_dropout = 0.1"),
        ("all-linear", {"use_dora": True}, "layers.0.self_attn.q_proj.*use_dora"),
        (["embed_tokens"], {}, "embed_tokens.*not LoRA of a linear layer"),
        (["q_proj"], {"modules_to_save": ["lm_head"]}, "lm_head.*trained copy"),
    ],
)
def test_adapters_that_cannot_be_cut_are_refused_by_name(targets, keys, why):
    text = refused(with_lora(build(), targets, **keys))
    assert re.search(why, text), text
    assert "Train without tensor parallelism" in text


def test_adapters_on_heads_that_ranks_would_share_are_refused():
    assert "1 heads, which 2 tensor ranks cannot share" in refused(with_lora(build(1), ["k_proj"]))


@on_ranks(2)
def test_adapters_that_were_made_for_a_part_of_a_layer_are_refused():
    from zeroshard.deepspeed import tp_model_init

    model = with_lora(tp_model_init(build(), tp_size=2, dtype=torch.float64), ["o_proj"])
    with pytest.raises(UsageError, match=r"o_proj' has an adapter of shape \(4, 16\)"):
        initialize(model=model, config={**CONFIG, "optimizer": {"type": "AdamW"}})
