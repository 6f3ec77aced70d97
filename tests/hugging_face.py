"""Tiny Transformers models with random weights. Nothing is downloaded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 0}
_SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16},
    "t5": {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 2, "d_kv": 16, "vocab_size": 50},
}  # fmt: skip
INPUT_IDS = torch.arange(3, 11).view(1, 8)


def hugging_face(family: str) -> tuple[Any, nn.Module]:
    """The class that loads a family, and an untrained model of it, always the same. Skips the test
    where transformers is not installed."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.utils.logging.disable_progress_bar()  # it leaves a thread behind
    auto = {"gpt2": transformers.AutoModelForCausalLM, "t5": transformers.AutoModelForSeq2SeqLM}
    config = transformers.AutoConfig.for_model(family, **_SIZES[family], **_IDS)
    torch.manual_seed(3)
    return auto[family], auto[family].from_config(config).eval()


def logits(forward: Any, family: str) -> Tensor:
    """The logits of the model, or of its engine, for some tokens."""
    inputs = {"decoder_input_ids": INPUT_IDS} if family == "t5" else {}
    with torch.no_grad():
        found: Tensor = forward(INPUT_IDS, **inputs).logits
    return found
