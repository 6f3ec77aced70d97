"""What a run of a small copy of a Transformers model refuses to guess."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_plan import decide

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 500, "hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 16,
    "pad_token_id": 499,
}  # fmt: skip


def build(family: str = "opt", **keys: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **keys})
    return transformers.AutoModelForCausalLM.from_config(config)


def refusal(model: nn.Module, size: int = 2) -> str:
    with pytest.raises(UsageError) as found:
        decide(model, size, "auto")
    return str(found.value)


def test_a_model_on_the_meta_device_has_a_plan_and_no_random_number_is_drawn():
    with torch.device("meta"):
        model = build()
    before = torch.random.get_rng_state()
    plan = decide(model, 2, "auto")
    assert torch.equal(before, torch.random.get_rng_state())
    assert {plan.styles[f"model.decoder.layers.2.{leaf}"] for leaf in ("fc1", "fc2")} == {
        "colwise",
        "rowwise",
    }
    assert model.get_submodule("model.decoder.layers.0.self_attn").num_heads == 4
    assert all(param.is_meta for param in model.parameters())


def test_biases_that_the_model_computes_for_all_heads_are_refused():
    text = refusal(build("bloom", n_head=4))
    assert "BloomForCausalLM has no plan of Transformers" in text
    assert "a trial run failed: RuntimeError" in text
    assert "Pass a plan" in text


def test_heads_that_are_mixed_in_silence_are_refused(monkeypatch):
    kind = transformers.models.opt.modeling_opt.OPTAttention
    forward = kind.forward

    def mean_of_heads(self: Any, *args: Any, **keys: Any) -> Any:
        y, weights = forward(self, *args, **keys)
        return y / self.num_heads, weights

    model = build()
    decide(model, 2, "auto")
    monkeypatch.setattr(kind, "forward", mean_of_heads)
    assert "the parts of its layers did not add up to their whole result" in refusal(model)


def test_layers_that_the_copy_does_not_have_or_reach_are_refused():
    model = build()
    model.get_submodule("model.decoder.layers.2").extra = nn.Linear(4, 4)
    assert "has no layer like 'model.decoder.layers.2.extra'" in refusal(model)
    text = refusal(build("mamba"))
    assert "the trial run did not reach 'backbone.layers.0.mixer" in text


def test_heads_that_ranks_cannot_share_are_named():
    assert "cannot share evenly" in refusal(build(), size=3)
    assert "4 heads of 8 rows, which 8 tensor ranks cannot share" in refusal(build(), size=8)


def test_a_class_that_cannot_be_built_from_its_configuration_is_refused():
    kind = type(build())

    class Odd(kind):  # type: ignore[misc,valid-type]
        def __init__(self, config: Any, extra: int) -> None:
            super().__init__(config)

    model = Odd(build().config, 1)
    assert "a small copy could not be built: TypeError" in refusal(model)
