"""Models of images can be planned, although torch's ``trunc_normal_`` reads values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from zeroshard.core.mesh import Mesh
from zeroshard.planner import simulate
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.model_source import loss_of
from zeroshard.zero import Init

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
}  # fmt: skip
IMAGES = {"image_size": 32, "patch_size": 16}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW"},
    "zero_optimization": {"stage": 3},
}


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, **IMAGES, num_labels=3)
    return transformers.ViTForImageClassification(config)


def modern_bert() -> nn.Module:
    ids = dict.fromkeys(("bos", "eos", "cls", "sep", "pad"), 0)
    config = transformers.ModernBertConfig(
        **SIZES, vocab_size=64, **{f"{name}_token_id": at for name, at in ids.items()}
    )
    return transformers.ModernBertForMaskedLM(config)


def gemma3() -> nn.Module:
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**SIZES, **IMAGES, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        image_token_index=63,
        boi_token_index=62,
        eoi_token_index=61,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def on_meta(*names: str, **more: Any) -> dict[str, Any]:
    ids = torch.zeros(2, 16, dtype=torch.long, device="meta")
    return dict.fromkeys(names, ids) | more


BATCHES = {
    vit: {
        "pixel_values": torch.empty(2, 3, 32, 32, device="meta"),
        "labels": torch.zeros(2, dtype=torch.long, device="meta"),
    },
    modern_bert: on_meta("input_ids", "labels"),
    gemma3: on_meta("input_ids", "labels", "token_type_ids"),
}


@pytest.mark.parametrize("make", BATCHES, ids=lambda make: make.__name__)
def test_a_model_of_images_is_planned_under_init(make):
    def build() -> nn.Module:
        with Init():
            return make()

    found = simulate(
        build, CONFIG, (BATCHES[make], None), mesh=Mesh(data_shard=4), rank=0, loss_fn=loss_of
    )
    assert found.params_numel == sum(param.numel() for param in make().parameters())


def test_values_of_real_tensors_are_within_bounds_again():
    with fake_tensors():
        nn.init.trunc_normal_(torch.empty(8, 8))
    values = nn.init.trunc_normal_(torch.empty(64, 64), std=0.8, a=-0.5, b=0.5)
    assert values.abs().max() <= 0.5
