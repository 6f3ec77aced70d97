"""A tiny Llama and batches for sequence parallelism, and what one process makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

VOCAB, TOKENS, SAMPLES, STEPS, CLIP, LR = 61, 16, 2, 3, 0.5, 1e-2


@dataclass(frozen=True)
class Setting:
    """``packed``: rows with two samples each. ``window``: of a sliding window. ``micro``: per step."""

    kv_heads: int = 4
    packed: bool = False
    window: int | None = None
    micro: int = 1


def model(setting: Setting, dtype: torch.dtype = torch.float64) -> Any:
    """A model of Transformers with 4 heads, equal in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes: dict[str, Any] = dict(  # noqa: C408
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=setting.kv_heads, max_position_embeddings=64,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(1)
    if setting.window is None:
        return LlamaForCausalLM(LlamaConfig(**sizes)).to(dtype)
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=setting.window)).to(dtype)


def positions(setting: Setting) -> Tensor:
    lengths = (10, 6) if setting.packed else (TOKENS,)
    return torch.cat([torch.arange(n) for n in lengths]).expand(SAMPLES, -1)


def batches(setting: Setting, data: int) -> list[list[list[dict[str, Tensor]]]]:
    """Whole batches by step, micro-batch and data rank. The first half of a few has no labels at all."""
    draw = torch.Generator().manual_seed(7)
    shape = (STEPS, setting.micro, data, SAMPLES, TOKENS)
    ids = torch.randint(0, VOCAB, shape, generator=draw)
    hidden = torch.rand(shape, generator=draw) < 0.3
    hidden[:, :, 0, :, : TOKENS // 2] = True
    labels, place = ids.masked_fill(hidden, -100), positions(setting)
    return [
        [
            [
                {"input_ids": ids[s, m, d], "labels": labels[s, m, d], "position_ids": place}
                for d in range(data)
            ]
            for m in range(setting.micro)
        ]
        for s in range(STEPS)
    ]


def cross_entropy(logits: Tensor, shifted: Tensor) -> Tensor:
    """The mean over labels that count, in at least fp32."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), shifted.flatten(), ignore_index=-100)


def shifted(labels: Tensor) -> Tensor:
    return F.pad(labels, (0, 1), value=-100)[..., 1:]


@dataclass
class Run:
    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]


def in_one_process(setting: Setting, data: int) -> Run:
    """AdamW with clipping on the batches of all ranks, in fp64."""
    net = model(setting)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    run = Run([], [], {})
    for step in batches(setting, data):
        optimizer.zero_grad()
        total = 0.0
        for micro in step:
            for batch in micro:
                out = net(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
                loss = cross_entropy(out.logits, shifted(batch["labels"])) / data / setting.micro
                loss.backward()
                total += loss.item()
        run.norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
        optimizer.step()
        run.losses.append(total)
    run.params = {name: param.detach().clone() for name, param in net.named_parameters()}
    return run
