"""Models of published runs, with their sizes and without weights, and their inputs on the meta device.

Each function takes the samples of a micro-batch, and returns what builds the model, and the inputs by
name. Letters: B samples, T tokens, P patches of an image, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

Build: TypeAlias = Callable[[], nn.Module]
Inputs: TypeAlias = dict[str, Tensor]


def ids(samples: int, tokens: int) -> Tensor:
    """Token ids ``[samples, tokens]`` without values."""
    return torch.empty(samples, tokens, dtype=torch.long, device="meta")


def _config(kind: str, **sizes: Any) -> Any:
    """A configuration of Transformers. What is not given has the default of its kind."""
    return transformers.AutoConfig.for_model(kind, **sizes)


def in_bf16(build: Build) -> Build:
    """``build`` with bf16 as the default dtype."""

    def made() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return build().train()
        finally:
            torch.set_default_dtype(before)

    return made


def deberta(samples: int, tokens: int = 128) -> tuple[Build, Inputs]:
    """DeBERTa-v2-xlarge with a head for two classes."""
    config = _config(
        "deberta-v2",
        hidden_size=1536, num_hidden_layers=24, num_attention_heads=24, intermediate_size=6144,
        vocab_size=128100, relative_attention=True, position_buckets=256, share_att_key=True,
        norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], conv_kernel_size=3, conv_act="gelu",
        type_vocab_size=0, position_biased_input=False, pooler_hidden_size=1536, num_labels=2,
        problem_type="single_label_classification",
    )  # fmt: skip
    batch = {"input_ids": ids(samples, tokens), "attention_mask": ids(samples, tokens)}
    batch["labels"] = torch.empty(samples, dtype=torch.long, device="meta")
    return lambda: transformers.DebertaV2ForSequenceClassification(config).train(), batch


def deberta_96(samples: int) -> tuple[Build, Inputs]:
    """:func:`deberta` with 96 tokens."""
    return deberta(samples, 96)


def blenderbot(samples: int) -> tuple[Build, Inputs]:
    """Blenderbot-400M-distill; 128 tokens of source and 64 of target."""
    config = _config(
        "blenderbot",
        d_model=1280, encoder_layers=2, decoder_layers=12, encoder_attention_heads=32,
        decoder_attention_heads=32, encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=8008,
        max_position_embeddings=128, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    batch = {"input_ids": ids(samples, 128), "attention_mask": ids(samples, 128)}
    batch["labels"] = ids(samples, 64)
    return lambda: transformers.BlenderbotForConditionalGeneration(config).train(), batch


def gpt2_xl(samples: int) -> tuple[Build, Inputs]:
    """GPT-2 XL; blocks of 128 tokens."""
    config = _config(
        "gpt2", n_embd=1600, n_layer=48, n_head=25, use_cache=False, attn_implementation="eager"
    )
    words_BT = ids(samples, 128)
    batch = {"input_ids": words_BT, "labels": words_BT}
    return lambda: transformers.GPT2LMHeadModel(config).train(), batch


LLAMA: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
           "tie_word_embeddings": True},
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "13B": {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
            "num_key_value_heads": 40, "vocab_size": 32000},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "70B of Llama 2": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
                       "vocab_size": 32000},
})  # fmt: skip
"""Sizes of Llama 2, 3, 3.1 and 3.2, where they differ from those of :func:`llama`."""


def llama_8b(samples: int, *, checkpointed: bool, layers: int = 32) -> tuple[Build, Inputs]:
    """Llama 3.1 8B; 8,192 tokens."""
    return llama(samples, 8192, size="8B", layers=layers, checkpointed=checkpointed)


def llama(
    samples: int, tokens: int, *, size: str, layers: int, checkpointed: bool = False
) -> tuple[Build, Inputs]:
    """A Llama of a size of :data:`LLAMA`."""
    common = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072}
    sizes = {**common, **LLAMA[size], "num_hidden_layers": layers}
    config = _config("llama", use_cache=False, dtype="bfloat16", **sizes)

    def build() -> nn.Module:
        model: Any = transformers.LlamaForCausalLM(config)
        if checkpointed:
            model.gradient_checkpointing_enable()
        found: nn.Module = model
        return found

    words_BT = ids(samples, tokens)
    return in_bf16(build), {"input_ids": words_BT, "labels": words_BT}


VICUNA: Mapping[str, Mapping[str, int]] = MappingProxyType({
    "7B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
           "intermediate_size": 11008},
    "13B": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
            "intermediate_size": 13824},
})  # fmt: skip
"""Sizes of the language models of LLaVA-1.5."""

PATCHES = 24 * 24
"""Of an image of 336 x 336 pixels."""


class Adapted(nn.Module):
    """A frozen linear layer with a LoRA adapter of rank 128."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 128, bias=False)
        self.up = nn.Linear(128, layer.out_features, bias=False)
        self.dropout = nn.Dropout(0.05)

    def forward(self, x_BTD: Tensor) -> Tensor:
        added_BTD: Tensor = self.up(self.down(self.dropout(x_BTD)))
        out_BTD: Tensor = self.layer(x_BTD) + 2.0 * added_BTD
        return out_BTD


class Llava(nn.Module):
    """LLaVA-1.5: a frozen CLIP ViT-L/14 for 336 pixels, two layers that project, and Vicuna.

    Every sample has an image. ``projector_last``: registered after the language model, as in the
    authors' code, and not before it, as in Transformers. ``layers``: so many in both models; None: all.
    """

    def __init__(self, size: str, *, lora: bool, projector_last: bool, layers: int | None) -> None:
        super().__init__()
        sizes = dict(VICUNA[size]) | ({"num_hidden_layers": layers} if layers else {})
        width = sizes["hidden_size"]
        vision = _config(
            "clip_vision_model",
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers or 24,
            num_attention_heads=16, image_size=336, patch_size=14,
        )  # fmt: skip
        self.tower: Any = transformers.CLIPVisionModel(vision).requires_grad_(False)
        if not projector_last:
            self.projector = self._projector(width)
        text = _config("llama", vocab_size=32000, use_cache=False, **sizes)
        self.language: Any = transformers.LlamaForCausalLM(text)
        self.language.gradient_checkpointing_enable()
        if projector_last:
            self.projector = self._projector(width)
        if lora:
            self.language.requires_grad_(False)
            for block in self.language.model.layers:
                for holder in (block.self_attn, block.mlp):
                    for name, layer in list(holder.named_children()):
                        if isinstance(layer, nn.Linear):
                            setattr(holder, name, Adapted(layer))

    @staticmethod
    def _projector(width: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(1024, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> Any:
        with torch.no_grad():
            states = self.tower(pixel_values, output_hidden_states=True).hidden_states
        image_BPD = self.projector(states[-2][:, 1:])
        words_BTD = self.language.get_input_embeddings()(input_ids)
        return self.language(inputs_embeds=torch.cat([image_BPD, words_BTD], 1), labels=labels)


def llava(
    samples: int,
    *,
    size: str,
    lora: bool = False,
    projector_last: bool = False,
    layers: int | None = None,
) -> tuple[Build, Inputs]:
    """LLaVA-1.5 in bf16 with checkpointing of every layer; 2,048 tokens, of which 576 are an image."""
    batch = {
        "pixel_values": torch.empty(samples, 3, 336, 336, dtype=torch.bfloat16, device="meta"),
        "input_ids": ids(samples, 2048 - PATCHES),
        "labels": ids(samples, 2048),
    }
    build = in_bf16(lambda: Llava(size, lora=lora, projector_last=projector_last, layers=layers))
    return build, batch
