"""Makes a model of a few thousand parameters from a configuration class. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
from torch import nn

WIDTH, HEADS, LAYERS, INNER, VOCAB, IMAGE, PATCH = 16, 2, 2, 24, 48, 16, 8
TEXT_IMAGE_TOKEN = 47
"""The token that stands for a piece of an image."""

_SIZES: list[tuple[float, str]] = [
    (
        WIDTH,
        "hidden_size d_model n_embd embed_dim dim encoder_hidden_dim projection_dim emb_dim lru_width "
        "hidden_dim decoder_hidden_size embedding_size embedding_dim cross_attention_hidden_size "
        "shared_embed_dim word_embed_proj_dim image_text_hidden_size",
    ),
    (
        LAYERS,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth "
        "num_decoder_layers num_encoder_layers num_transformer_layers decoder_num_hidden_layers",
    ),
    (
        HEADS,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_key_value_heads decoder_num_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_experts_per_tok",
    ),
    (
        INNER,
        "intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim dim_feedforward n_inner "
        "moe_intermediate_size decoder_intermediate_size shared_expert_intermediate_size",
    ),
    (
        32,
        "max_position_embeddings n_positions max_source_positions max_target_positions max_seq_len",
    ),
    (8, "d_kv head_dim patch_size"),
    (5, "num_queries"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (IMAGE, "image_size"),
    (VOCAB, "vocab_size"),
    (0, "bos_token_id decoder_start_token_id"),
    (1, "eos_token_id"),
    (2, "pad_token_id"),
    (0.0, "layerdrop encoder_layerdrop decoder_layerdrop"),
]
TINY = {name: size for size, names in _SIZES for name in names.split()}
"""What a field of a configuration becomes, by its name. No layer is skipped by chance."""


def tiny_config(cls: type, given: dict[str, Any]) -> Any:
    """A configuration: :data:`TINY` where the class has the field, and what is ``given``.

    A dict in ``given`` for a part of a composed model is made a tiny configuration as well; its
    ``model_type`` chooses the class where the part may be any model.
    """
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {name: size for name, size in TINY.items() if name in fields} | given
    for part, spec in getattr(cls, "sub_configs_defaults", {}).items():
        own = given.get(part, {})
        if isinstance(own, dict):
            values[part] = _tiny_part(spec, dict(own))
    return cls(**values)


def _tiny_part(spec: Any, given: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    model_type = given.pop("model_type", None)
    own_class = isinstance(spec.config_class, type) and issubclass(
        spec.config_class, PreTrainedConfig
    )
    if model_type is None and own_class:
        return tiny_config(spec.config_class, given)
    return tiny_config(CONFIG_MAPPING[model_type or spec.model_type], given)


def transformers_model(cls: str, **given: Any) -> nn.Module:
    """An untrained model of that class in training mode. Skips where the class does not exist."""
    transformers = _installed("transformers")
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind
    transformers.utils.logging.set_verbosity_error()
    if not hasattr(transformers, cls):
        pytest.skip(f"transformers {transformers.__version__} has no {cls}")
    model_class = getattr(transformers, cls)
    return model_class(tiny_config(model_class.config_class, given)).train()


def timm_model(name: str, **given: Any) -> nn.Module:
    """One of timm's models without weights."""
    return _installed("timm").create_model(name, num_classes=5, **given).train()


def torchvision_model(factory: str, **given: Any) -> nn.Module:
    """``factory``: a function or class below ``torchvision.models``, by its dotted name."""
    module, _, name = f"torchvision.models.{factory}".rpartition(".")
    _installed("torchvision")
    return getattr(importlib.import_module(module), name)(**given).train()


def _installed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # torchvision raises the latter for another torch
        pytest.skip(f"{package} cannot be imported: {error}")
