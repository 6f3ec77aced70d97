"""Draws the picture of the README: memory of a GPU by stage, as ``zeroshard plan`` computes it.

    python tools/readme_picture.py            # five simulations, then draws docs/_static/memory.svg

What is in RESULTS is not planned again: remove the file after a change of the planner. The model has the
sizes of Llama 3.1 8B; eight GPUs, bf16, AdamW, one sample of 4,096 tokens with activation checkpointing.
No GPU, no weights and no network are needed. Needs Transformers and matplotlib.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroshard.core.texts import GIB
from zeroshard.planner.make_plan import Asked, make_plan

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs/_static/memory.svg"
RESULTS = ROOT / "benchmarks/results/readme-memory.json"
RANKS, LENGTH, GPU_GIB = 8, 4096, 80
SIZES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip
ON_HOST = {"device": "cpu"}
RUNS: Mapping[str, dict[str, Any]] = {
    "stage 0 (as DDP)": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 3, optimizer\nin host memory": {"stage": 3, "offload_optimizer": ON_HOST},
}
PARTS = {
    "parameters": ("parameters", "gathered"),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer", "master"),
}
COLORS = {
    "parameters": "#2f6db5", "gradients": "#63a7a0", "optimizer state": "#d08a3a",
    "activations, buffers": "#9a9fa6",
}  # fmt: skip


def planned(zero: dict[str, Any], model: str) -> dict[str, float]:
    """GiB of each part at the moment of a step at which a GPU holds the most."""
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}, "zero_optimization": zero,
    }  # fmt: skip
    plan = make_plan(
        Asked(
            model,
            config,
            ranks=RANKS,
            length=LENGTH,
            target="cuda",
            ranks_per_node=RANKS,
            memory_gib=GPU_GIB,
        ),
        checkpointing=True,
    )
    moment = plan.simulation.moments[plan.step_phase]
    of = {
        part: sum(
            nbytes
            for (category, tier), nbytes in moment.held.items()
            if tier == "device" and category.startswith(names)
        )
        for part, names in PARTS.items()
    }
    of["activations, buffers"] = moment.device_nbytes - sum(of.values())
    print(zero, {name: round(n / GIB, 2) for name, n in of.items()}, flush=True)
    return {name: nbytes / GIB for name, nbytes in of.items()}


def draw(found: Mapping[str, Mapping[str, float]]) -> None:
    """Write the picture. White behind it, so that it can be read on dark pages too."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "zeroshard"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.1), layout="constrained", facecolor="white")
    axes = figure.subplots()
    names = list(found)[::-1]
    left = [0.0] * len(names)
    for part, color in COLORS.items():
        widths = [found[name][part] for name in names]
        axes.barh(names, widths, left=left, color=color, label=part, height=0.62)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for at, total in enumerate(left):
        axes.text(total + 1.2, at, f"{total:.0f} GiB", va="center", fontsize=9)
    axes.axvline(GPU_GIB, color="#444444", linestyle="--", linewidth=1)
    axes.text(GPU_GIB + 0.8, -0.42, "a GPU with 80 GiB", fontsize=8, color="#444444")
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("peak memory of each of 8 GPUs in a step, GiB (planned)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.16), fontsize=8, frameon=False)
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    """Plan and draw."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SIZES), encoding="utf-8")
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        for name, zero in RUNS.items():
            if name not in found:
                found[name] = planned(zero, folder)
                RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        draw({name: found[name] for name in RUNS})
    text = PICTURE.read_text(encoding="utf-8")
    lines = (line.rstrip() for line in text.splitlines())
    PICTURE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
