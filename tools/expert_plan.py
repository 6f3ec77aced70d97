"""Prints the plan of a model with 236 B parameters on 1,024 ranks, for docs/experts.md.

    python tools/expert_plan.py

The model has the sizes of DeepSeek-V2, and 32 ranks share the experts of a layer. Takes one to two
minutes of CPU time.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path

from zeroshard.planner.make_plan import Asked, make_plan

RANKS, SHARING, TOKENS = 1024, 32, 4096
MODEL = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "dtype": "bfloat16",
    "hidden_size": 5120, "num_hidden_layers": 60, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
    "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 102400, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "zero_optimization": {"stage": 3},
    "parallel": {"expert": SHARING},
}


def gib(nbytes: float) -> str:
    """As GiB with three digits or more."""
    return f"{nbytes / 2**30:.3g} GiB"


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        plan = make_plan(
            Asked(folder, CONFIG, ranks=RANKS, length=TOKENS, target="cuda"),
            checkpointing=True,
            few=True,
        )
    found, (layers,) = plan.simulation, plan.simulation.experts
    sent: Counter[str] = Counter()
    for row in found.traffic:
        sent[row.group] += row.sent_nbytes
    rows = {
        "experts of a layer on a rank": f"{layers.own} of {layers.experts}",
        "ranks that shard them": str(layers.holders),
        "parameters of experts, and of all else, that a rank works with": f"{layers.numel / 1e9:.2f} B, "
        f"{(found.params_numel - layers.numel) / 1e9:.2f} B",
        "parameters, gradients, masters and moments": gib(found.states_nbytes),
        "peak while the model is built": gib(found.moments["init"].device_nbytes),
        "peak of a step": gib(found.peak_nbytes),
        "a rank sends: tokens and results": gib(sent[f"{SHARING} that share experts"]),
        "gathers and reductions of experts": gib(sent[f"same of {SHARING} parts of experts"]),
        "gathers and reductions of all else": gib(sent["all ranks"]),
    }
    print("| what | of one rank |\n|---|--:|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
