"""Plans published runs, and writes the tables of ``docs/plan-published.md``.

    python tools/plan_published.py            # prints the tables; takes some minutes of CPU
    python tools/plan_published.py --write    # and puts them into the page

Sources are named on the page. Models have the published sizes and no weights; tensors are fake, and
operations are those of a GPU. Needs Transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from zeroshard.config.machine_file import load_machine
from zeroshard.core.mesh import Mesh
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import Simulation, simulate
from zeroshard.planner.step_time import step_time
from zeroshard.zero import Init

PAGE = Path(__file__).parents[1] / "docs/plan-published.md"
BATCHES, LLAMA = "plan_published.py: batches", "plan_published.py: Llama"

CARD_NBYTES = 24 * 2**30
CONTEXT_NBYTES = 1_300_000_000
"""Of the card, for the context and libraries of CUDA: assumed."""

FP16 = {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}

Maker = Callable[[int], tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]]
"""From samples of a micro-batch: what builds the model, and the inputs by name."""


@dataclass(frozen=True)
class Row:
    """One published run. ``published``: samples of the largest micro-batch; 0: none fits."""

    model: str
    how: str
    make: Maker
    published: int
    stage: int
    keys: Mapping[str, Any]
    zero: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2


def _ids(samples: int, tokens: int) -> torch.Tensor:
    return torch.empty(samples, tokens, dtype=torch.long, device="meta")


def _config(kind: str, **sizes: Any) -> Any:
    """A configuration of Transformers. What is not given has the default of its kind."""
    return transformers.AutoConfig.for_model(kind, **sizes)


def deberta(samples: int) -> Any:
    """DeBERTa-v2-xlarge with a head for two classes; 128 tokens."""
    config = _config(
        "deberta-v2",
        hidden_size=1536, num_hidden_layers=24, num_attention_heads=24, intermediate_size=6144,
        vocab_size=128100, relative_attention=True, position_buckets=256, share_att_key=True,
        norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], conv_kernel_size=3, conv_act="gelu",
        type_vocab_size=0, position_biased_input=False, pooler_hidden_size=1536, num_labels=2,
        problem_type="single_label_classification",
    )  # fmt: skip
    batch = {"input_ids": _ids(samples, 128), "attention_mask": _ids(samples, 128)}
    batch["labels"] = torch.empty(samples, dtype=torch.long, device="meta")
    return lambda: transformers.DebertaV2ForSequenceClassification(config).train(), batch


def blenderbot(samples: int) -> Any:
    """Blenderbot-400M-distill; 128 tokens of source and 64 of target."""
    config = _config(
        "blenderbot",
        d_model=1280, encoder_layers=2, decoder_layers=12, encoder_attention_heads=32,
        decoder_attention_heads=32, encoder_ffn_dim=5120, decoder_ffn_dim=5120, vocab_size=8008,
        max_position_embeddings=128, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    batch = {"input_ids": _ids(samples, 128), "attention_mask": _ids(samples, 128)}
    batch["labels"] = _ids(samples, 64)
    return lambda: transformers.BlenderbotForConditionalGeneration(config).train(), batch


def gpt2_xl(samples: int) -> Any:
    """GPT-2 XL; blocks of 128 tokens."""
    config = _config(
        "gpt2", n_embd=1600, n_layer=48, n_head=25, use_cache=False, attn_implementation="eager"
    )
    ids = _ids(samples, 128)
    return lambda: transformers.GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


ROWS = (
    Row("DeBERTa-v2-xlarge", "DDP, stage 0", deberta, 8, 0, AUTOCAST),
    Row("DeBERTa-v2-xlarge", "stage 2", deberta, 40, 2, FP16),
    Row("Blenderbot-400M", "stage 2", blenderbot, 200, 2, FP16),
    Row("GPT-2 XL", "DDP, stage 0", gpt2_xl, 0, 0, AUTOCAST, ranks=1),
)


def plan(row: Row, samples: int) -> Simulation:
    """One rank of a row with this micro-batch."""
    build, batch = row.make(samples)
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": row.stage, **row.zero},
        **row.keys,
    }
    mesh = Mesh(data_shard=row.ranks)
    return simulate(
        sharded(build) if row.stage == 3 else build, config, (batch, None), mesh=mesh, rank=0,
        loss_fn=loss_of, target="cuda",
    )  # fmt: skip


def sharded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """``build`` under ``zero.Init``."""

    def made() -> nn.Module:
        with Init():
            return build()

    return made


def batches(rows: Sequence[Row] = ROWS) -> list[str]:
    """The table of the largest micro-batches."""
    limit = CARD_NBYTES - CONTEXT_NBYTES
    lines = [
        "| model | how | ranks | published | planned | off | one sample, GB | each further, MB |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        peaks: dict[int, int] = {}

        def peak(samples: int, row: Row = row, peaks: dict[int, int] = peaks) -> int:
            if samples not in peaks:
                peaks[samples] = plan(row, samples).peak_nbytes
            return peaks[samples]

        found = largest(peak, limit, near=row.published or 2)
        high = max(peaks)
        slope = (peaks[high] - peaks[1]) / (high - 1)
        lines.append(
            f"| {row.model} | {row.how} | {row.ranks} | {row.published or 'none'} | {found or 'none'} | "
            f"{off(row.published, found)} | {peaks[1] / 1e9:.2f} | {slope / 1e6:.0f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def largest(peak: Callable[[int], int], limit: int, *, near: int) -> int:
    """The most samples that fit; 0 if one does not. ``near``: where to look for the slope of the peak."""
    slope = (peak(near) - peak(1)) / (near - 1)
    if peak(1) > limit:
        return 0
    found = 1 + int((limit - peak(1)) / slope)
    while peak(found) > limit:
        found -= 1
    while peak(found + 1) <= limit:
        found += 1
    return found


def off(published: float, planned: float) -> str:
    """How far the planned number is above the published one."""
    return f"{planned / published - 1:+.0%}" if published else "0" if not planned else "wrong"


TORCHTITAN = {"tokens": 5762.0, "gib": 82.4}
"""Llama 3.1 8B on 8 H100 of 96 GB: tokens per second of one GPU, and GiB of its memory."""


def llama() -> list[str]:
    """The table of Llama 3.1 8B: eager FSDP, two samples of 8,192 tokens on each of 8 GPUs."""
    lines = [
        "| activation checkpointing | tokens/s of a GPU | GiB | state, GiB |",
        "|---|--:|--:|--:|",
        f"| of some operations: published | {TORCHTITAN['tokens']:,.0f} | {TORCHTITAN['gib']:.1f} | |",
    ]
    machine = load_machine("h100")
    for checkpointed in (False, True):
        found = plan_llama(checkpointed=checkpointed)
        time = step_time(found, machine, samples=16, tokens=16 * 8192)
        state = sum(
            found.nbytes(category)
            for category in ("parameters", "gradients", "master", "optimizer")
        )
        lines.append(
            f"| {'of every layer' if checkpointed else 'none'}: planned | "
            f"{time.tokens / time.total_s / 8:,.0f} | {found.peak_nbytes / 2**30:.1f} | "
            f"{state / 2**30:.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def plan_llama(*, checkpointed: bool, layers: int = 32) -> Simulation:
    """One rank of eight."""
    config = _config(
        "llama",
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
        use_cache=False, dtype="bfloat16",
    )  # fmt: skip

    def build() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model: Any = transformers.LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        if checkpointed:
            model.gradient_checkpointing_enable()
        found: nn.Module = model.train()
        return found

    ids = _ids(2, 8192)
    keys = {
        "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 3},
    }  # fmt: skip
    return simulate(
        sharded(build), keys, ({"input_ids": ids, "labels": ids}, None), mesh=Mesh(data_shard=8),
        rank=0, loss_fn=loss_of, target="cuda", with_events=True,
    )  # fmt: skip


def put(page: str, name: str, lines: list[str]) -> str:
    """The page with a table between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, after = page.split(begin, maxsplit=1)[0], page.split(end)[1]
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])


def main() -> None:
    """Plan all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    write = parser.parse_args().write
    tables = {BATCHES: batches(), LLAMA: llama()}
    page = PAGE.read_text() if write else ""
    for name, lines in tables.items():
        print("\n".join(lines))
        if write:
            page = put(page, name, lines)
    if write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
