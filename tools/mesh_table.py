"""Writes the table of simulated ranks into ``docs/parallel.md``: a 72 B model on 64 and 128 ranks.

    python tools/mesh_table.py            # prints the table; takes about 25 minutes
    python tools/mesh_table.py --write    # and puts it into the page

One rank of every pipeline stage is simulated, each in a process of its own. The bytes are also computed
here, from the sizes of the model and without the engine; a rank that differs ends the run. So does a
message between two stages that has no partner, and a rank that takes more than 240 s of CPU time or
1 GiB. Needs Transformers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.simulation import Message, unmatched
from zeroshard.core.mesh import Mesh
from zeroshard.parallel import pipeline, tensor_parallel
from zeroshard.parallel.tensor_plan import neighbours
from zeroshard.planner import simulate

PAGE = Path(__file__).parents[1] / "docs/parallel.md"
BEGIN, END = "<!-- mesh_table.py: begin -->", "<!-- mesh_table.py: end -->"

LIMIT_S, LIMIT_NBYTES = 240.0, 2**30
"""What the simulation of one rank may take: CPU time, with 20 layers on a slow processor, and memory."""


@dataclass(frozen=True)
class Sizes:
    """A decoder with Llama's layers. 72.7 B parameters."""

    layers: int = 80
    hidden: int = 8192
    inner: int = 29568
    heads: int = 64
    kv_heads: int = 8
    vocabulary: int = 152064
    length: int = 4096

    def layer_numel(self, tensor: int) -> int:
        """Elements of one layer on one of ``tensor`` ranks. Norms are whole on each of them."""
        kv = self.hidden * self.kv_heads // self.heads
        matrices = self.hidden * (2 * self.hidden + 2 * kv) + 3 * self.hidden * self.inner
        return matrices // tensor + 2 * self.hidden

    def stage_numel(self, stage: int, stages: int, tensor: int) -> int:
        """Elements of one pipeline stage on one of ``tensor`` ranks."""
        table = self.vocabulary * self.hidden // tensor
        first, last = stage == 0, stage == stages - 1
        ends = (table if first else 0) + (table + self.hidden if last else 0)
        return self.layers // stages * self.layer_numel(tensor) + ends

    def stage_params(self, stage: int, stages: int) -> int:
        """Parameters, not elements, of one pipeline stage."""
        return 9 * self.layers // stages + (stage == 0) + 2 * (stage == stages - 1)


@dataclass(frozen=True)
class Example:
    """One layout of the model: stage of ZeRO, mesh, and micro-batches of one sequence in a step."""

    stage: int
    mesh: Mesh
    micro_batches: int = 16


EXAMPLES = {
    "64 ranks": Example(1, Mesh(pipeline=8, data_shard=1, tensor=8)),
    "128 ranks": Example(3, Mesh(pipeline=8, data_shard=2, tensor=8)),
    "4 x 4 x 4": Example(3, Mesh(pipeline=4, data_shard=4, tensor=4)),
}


class Embed(nn.Module):
    """Token ids to hidden states."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids_BT)
        return x


class Layer(nn.Module):
    """A decoder layer of Transformers that computes the positions' rotations by itself."""

    def __init__(self, config: Any, at: int) -> None:
        super().__init__()
        from transformers.models.llama import modeling_llama as llama

        self.block = llama.LlamaDecoderLayer(config, at)
        self.rotary = llama.LlamaRotaryEmbedding(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        def run(x_BTD: Tensor) -> Tensor:
            places = torch.arange(x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
            y = self.block(x_BTD, position_embeddings=self.rotary(x_BTD, places))
            out: Tensor = y[0] if isinstance(y, tuple) else y
            return out

        if not torch.is_grad_enabled():
            return run(x_BTD)
        y: Tensor = torch.utils.checkpoint.checkpoint(run, x_BTD, use_reentrant=False)
        return y


PLAN = {
    "0.tokens": "vocab",
    "*.block.self_attn.[qkv]_proj": "colwise",
    "*.block.self_attn.o_proj": "rowwise",
    "*.block.mlp.gate_proj": "colwise",
    "*.block.mlp.up_proj": "colwise",
    "*.block.mlp.down_proj": "rowwise",
}


def build(sizes: Sizes, mesh: Mesh) -> nn.Module:
    """The model, cut over tensor ranks and into pipeline stages of equal numbers of layers."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.inner, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, num_hidden_layers=sizes.layers,
        vocab_size=sizes.vocabulary,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    norm = LlamaRMSNorm(sizes.hidden)
    head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
    layers = [Layer(config, at) for at in range(sizes.layers)]
    model = nn.Sequential(Embed(config), *layers, norm, head)
    if mesh.tensor > 1:
        plan = {**PLAN, str(sizes.layers + 2): "colwise_gather"}
        tensor_parallel(model, neighbours(mesh.tensor), plan)
    if mesh.pipeline == 1:
        return model
    share = sizes.layers // mesh.pipeline
    return pipeline(
        model, split=[str(1 + share * stage) for stage in range(1, mesh.pipeline)], loss_fn=loss_of
    )


def loss_of(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean over tokens."""
    return nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten())


@dataclass(frozen=True)
class Row:
    """One simulated rank. Sizes in bytes, traffic in elements, ``seconds`` of CPU time."""

    rank: int
    numel: int
    expected: dict[str, int]
    counted: dict[str, int]
    gathered: int
    buckets: int
    activations: int
    peak: int
    all_gather: int
    reduce_scatter: int
    tensor_numel: int
    messages: int
    fragments: int
    bubble: float
    in_flight: int
    seconds: float
    rss_nbytes: int


def expected(sizes: Sizes, example: Example, rank: int) -> tuple[int, dict[str, int]]:
    """Elements and bytes of a rank between steps, by arithmetic (ZeRO paper, section 3.1).

    bf16 parameters; gradients of several micro-batches are added in fp32; fp32 masters and two moments.
    """
    mesh = example.mesh
    at = mesh.coordinate(rank)["pipeline"]
    numel = sizes.stage_numel(at, mesh.pipeline, mesh.tensor)
    shares = [mesh.data_shard if example.stage >= level else 1 for level in (3, 2, 1)]
    return numel, {
        "parameters": 2 * numel // shares[0],
        "gradients": 4 * numel // shares[1],
        "master": 4 * numel // shares[2],
        "moments": 8 * numel // shares[2],
    }


def simulated(sizes: Sizes, example: Example, rank: int) -> tuple[Row, list[Message]]:
    """Simulate one rank and compare its bytes with :func:`expected`."""
    begun_s = time.process_time()
    mesh = example.mesh
    ids = torch.empty(1, sizes.length, dtype=torch.long, device="meta")
    found = simulate(
        lambda: build(sizes, mesh),
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": example.micro_batches,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": example.stage},
        },
        (ids, ids),
        mesh=mesh,
        rank=rank,
    )
    numel, plan = expected(sizes, example, rank)
    counted = {name: found.nbytes(name) for name in plan if name != "moments"}
    counted["moments"] = found.nbytes("optimizer")
    group = "shards" if mesh.data_shard < mesh.world_size else "all ranks"
    tensor_ops = ("all_reduce", "all_gather", "reduce_scatter")
    return Row(
        rank, numel, plan, counted, found.nbytes("gathered"), found.nbytes("buckets"),
        found.activations_nbytes, found.peak_nbytes,
        found.moved_numel(group, "all_gather"), found.moved_numel(group, "reduce_scatter"),
        sum(found.moved_numel("tensor", op) for op in tensor_ops), len(found.messages),
        sizes.stage_params(mesh.coordinate(rank)["pipeline"], mesh.pipeline),
        found.bubble, found.in_flight, time.process_time() - begun_s,
        1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    ), list(found.messages)  # fmt: skip


def differences(row: Row) -> list[str]:
    """What a simulated rank does not keep to."""
    found = []
    for name, nbytes in row.expected.items():
        over = row.counted[name] - nbytes
        allowed = 4 * row.fragments if name == "moments" else 0  # a step count for each
        if not 0 <= over <= allowed:
            found.append(f"{name}: {row.counted[name]} bytes, not {nbytes}")
    if row.seconds > LIMIT_S or row.rss_nbytes > LIMIT_NBYTES:
        found.append(f"took {row.seconds:.0f} s and {row.rss_nbytes / 2**20:.0f} MiB")
    return found


def run(sizes: Sizes, example: Example, jobs: int) -> list[Row]:
    """Simulate one rank of each pipeline stage, each in a process of its own, ``jobs`` at a time.

    Raises:
        SystemExit: a rank does not keep to the plan, or a message has no partner.
    """
    rows: list[Row] = []
    messages: dict[int, Sequence[Message]] = {}
    ranks = example.mesh.group(0, {"pipeline"})
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        found = [(rank, pool.apply_async(simulated, (sizes, example, rank))) for rank in ranks]
        answers = [(rank, each.get(timeout=20 * LIMIT_S)) for rank, each in found]
    for rank, (row, messages[rank]) in answers:
        print(
            f"rank {rank}: {row.seconds:.0f} s, {row.rss_nbytes / 2**20:.0f} MiB", file=sys.stderr
        )
        if wrong := differences(row):
            raise SystemExit(f"rank {rank}: {'; '.join(wrong)}")
        rows.append(row)
    if lost := unmatched(messages):
        raise SystemExit(f"{len(lost)} messages without a partner, the first: {lost[0]}")
    return rows


HEAD = (
    "| | rank | parameters held | parameters | gradients | masters | moments | gathered | buckets "
    "| activations | peak | gathers | reductions | tensor ranks |\n"
    "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def table(found: dict[str, list[Row]]) -> str:
    """The table in Markdown, and what was measured while it was made."""
    lines, every = [HEAD], [row for rows in found.values() for row in rows]
    for name, rows in found.items():
        for at, row in enumerate(rows):
            sizes = [*row.counted.values(), row.gathered, row.buckets, row.activations, row.peak]
            moved = [row.all_gather, row.reduce_scatter, row.tensor_numel]
            cells = [
                f"{name}, stage {at + 1} of {len(rows)}", str(row.rank), f"{row.numel / 1e9:.3f} B",
                *(f"{size / 1e9:.2f}" for size in sizes), *(f"{n / 1e9:.2f}" for n in moved),
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    bubbles = ", ".join(f"{rows[0].bubble:.1%} ({name})" for name, rows in found.items())
    slowest, largest = max(row.seconds for row in every), max(row.rss_nbytes for row in every)
    lines += [
        "",
        f"Bubble: {bubbles}. The bytes equal the plan, and the messages of neighbouring stages are "
        "partners. A rank took "
        f"at most {slowest:.0f} s of CPU time and {largest / 2**20:.0f} MiB.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table; with ``--write`` put it into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=EXAMPLES, nargs="*", default=list(EXAMPLES))
    parser.add_argument("--layers", type=int, default=Sizes.layers, help="fewer, to test the tool")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    given = parser.parse_args()
    sizes = Sizes(layers=given.layers)
    text = table({name: run(sizes, EXAMPLES[name], given.jobs) for name in given.only})
    print(text)
    if given.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
