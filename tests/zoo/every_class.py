"""Trains every class of Transformers that can be built tiny, and compares it with plain PyTorch.

    python tests/zoo/every_class.py                     # two data ranks, stages 2 and 3: the bits
    python tests/zoo/every_class.py --tensor            # two tensor ranks: losses and parameters
    python tests/zoo/every_class.py --only 'Qwen|Gemma' --out FILE.json

The zoo has chosen models with fitting batches. This program takes the language models of Transformers'
auto classes, with the sizes of ``zoo_build.TINY``. A class that cannot be built from these, or that does
not take a batch of texts, is left out and listed. A class ends as *equal*, *refused* (an error of
ZeroShard that says why), *differs* or *broken*. The last two are defects, or a model that does not give
the same numbers twice.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

# ruff: noqa: E402
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import zoo_batches as b
from zeroshard_testing.ranks import RanksFailed, pool, run_ranks
from zoo_build import transformers_model
from zoo_models import Model
from zoo_training import Setting, assert_same_bits, engine_run, plain_run

import zeroshard
from zeroshard.errors import ZeroShardError

SETTINGS = (
    Setting(stage=3),
    Setting(stage=3, bf16=True, init=True),
    Setting(stage=3, init=True, checkpointed=True),
    Setting(stage=2, bf16=True),
)
BATCHES = (b.language, b.unpadded, b.only_ids, b.translation, b.translation_of_one_length)
LARGEST = 60_000_000  # parameters: some classes have sizes that TINY does not reach
STEPS, LR = 3, 0.1
TOLERANCE = {torch.float64: (1e-11, 1e-6), torch.float32: (1e-5, 1e-3)}
"""Of losses, and of parameters: some norms compute in fp32 whatever the model's dtype is."""


def classes() -> Iterator[str]:
    """The names of all language models."""
    from transformers.models.auto import modeling_auto as auto

    names: dict[str, None] = {}
    for mapping in (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    ):
        for found in mapping.values():
            names.update(dict.fromkeys([found] if isinstance(found, str) else found))
    return iter(names)


def batch_of(cls: str) -> b.MakeBatch | str:
    """The first kind of batch that the class trains with, or why none of them fits."""
    why = ""
    for make in BATCHES:
        try:
            torch.manual_seed(1)
            model = transformers_model(cls)
            numel = sum(param.numel() for param in model.parameters())
            if numel > LARGEST:
                return f"{numel} parameters"
            loss = loss_of(model, make(model.config, torch.Generator().manual_seed(1)))
            loss.backward()
            if torch.isfinite(loss):
                return make
            why = f"a loss of {loss.item()}"
        except (Exception, pytest.skip.Exception) as error:  # whatever a model raises
            why = why or f"{type(error).__name__}: {str(error)[:120]}"
    return why


def loss_of(forward: Any, batch: dict[str, Any]) -> Tensor:
    output = forward(**batch)
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is None:
        first = output[0].flatten()
        loss = first @ torch.arange(first.numel()).cos().to(first) / first.numel()
    return loss


def on_data_ranks(cls: str) -> str:
    """Every setting of two data ranks. Collective."""
    make = batch_of(cls)
    if isinstance(make, str):
        return f"not built: {make}"
    model, found = Model("", partial(transformers_model, cls), make), []
    for setting in SETTINGS:
        try:
            expected = plain_run(model, setting.plain)
        except (RuntimeError, ValueError, AttributeError):
            continue  # plain PyTorch has no such operation in bf16, or the model no checkpointing
        try:
            assert_same_bits(engine_run(model, setting), expected)
        except AssertionError as error:
            return f"differs at {setting}: {error}"
        found.append(str(setting))
    return f"equal: {len(found)} settings"


def on_tensor_ranks(cls: str) -> str:
    """Stages 2 and 3 on two tensor ranks. Collective."""
    make = batch_of(cls)
    if isinstance(make, str):
        return f"not built: {make}"
    for dtype in (torch.float64, torch.float32):  # grouped products of experts have no fp64
        try:
            plain = tensor_model(cls, dtype)
            generators = (torch.Generator().manual_seed(step) for step in range(STEPS))
            batches = [make(plain.config, generator) for generator in generators]
            optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
            losses = []
            for batch in batches:
                loss = loss_of(plain, batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            break
        except RuntimeError as error:
            why = str(error)
    else:
        return f"not built: {why[:120]}"
    expected = dict(plain.named_parameters())
    of_losses, of_params = TOLERANCE[dtype]
    for stage in (2, 3):
        try:
            found, params = tensor_run(cls, dtype, stage, batches)
        except ZeroShardError as error:
            return f"refused: {error}"
        off = max(abs(a - c) / max(1.0, abs(c)) for a, c in zip(found, losses, strict=True))
        worst, name = max((relative(params[n], p), n) for n, p in expected.items() if n in params)
        if off > of_losses or worst > of_params:
            return f"differs at stage {stage}, {dtype}: losses {off:.1e}, {name} {worst:.1e}"
    return f"equal: {dtype}"


def tensor_model(cls: str, dtype: torch.dtype) -> Any:
    """In evaluation mode, so that nothing is random."""
    torch.manual_seed(1)
    return transformers_model(cls).to(dtype).eval()


def tensor_run(
    cls: str, dtype: torch.dtype, stage: int, batches: list[dict[str, Any]]
) -> tuple[list[float], dict[str, Tensor]]:
    model: nn.Module = tensor_model(cls, dtype)
    config = {
        "train_micro_batch_size_per_gpu": b.BATCH,
        "gradient_clipping": 0.0,
        "unit_min_numel": 1,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2},
        "trust": {"report": False},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = zeroshard.initialize(model=model, optimizer=optimizer, config=config)
    losses = []
    with engine:
        for batch in batches:
            loss = loss_of(engine, batch)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
        return losses, {name: full.detach().clone() for name, full in engine.iter_full_params()}


def relative(found: Tensor, expected: Tensor) -> float:
    return float(
        (found - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-3)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tensor", action="store_true", help="two tensor ranks, not two data ranks"
    )
    parser.add_argument("--only", default="", help="a regular expression for names of classes")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    body = on_tensor_ranks if options.tensor else on_data_ranks
    results: dict[str, str] = {}
    for cls in filter(re.compile(options.only).search, classes()):
        try:
            results[cls] = run_ranks(body, 2, cls, timeout=300)[0]
        except RanksFailed as error:
            lines = str(error).strip().splitlines()
            results[cls] = f"broken: {next((x for x in reversed(lines) if 'Error' in x), lines[0])}"
            pool().kill()
        if not results[cls].startswith(("equal", "not built")):
            print(f"{cls}: {results[cls]}", flush=True)
    found = Counter(re.split(r":| at ", text)[0] for text in results.values())
    print(", ".join(f"{count} {what}" for what, count in found.most_common()))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 1 if found["differs"] or found["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
