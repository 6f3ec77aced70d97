"""Measures what tensor parallelism costs the host: time of a training step, beside torch's modules.

    python benchmarks/tensor_cost.py [--rounds N] [--width W] [--smoke]

A small GPT is cut over two tensor ranks, by ``zeroshard.parallel.tensor_parallel`` and by torch's
``parallelize_module`` with the same layers column- and row-parallel. One process pretends to be rank 0:
torch's fake process group has all calls of a real one and moves no bytes. Kernels of this width take
almost no time, so what remains is what a library does on the host. On a GPU this time is visible when
the kernels of a layer take less time than it takes the host to launch them.

Each cut is measured in a plain loop (AdamW of torch) and under an engine. The systems take turns in one
process, on one thread. CPU time and wall time are medians of whole steps, and a ratio is one median
divided by another.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from interleaving import alternating
from machine import describe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.parallel import tensor_parallel

RANKS, BATCH, LENGTH, VOCABULARY, HEADS = 2, 2, 16, 64, 4
TARGET = 0.7
"""The greatest accepted time of our modules ÷ that of torch's, in the same loop."""


class Attention(nn.Module):
    """Causal attention over ``n_head`` heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = HEADS, width // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        q, k, v = (
            layer(x).view(batch, length, self.n_head, self.head_dim).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2 = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Embedding, blocks, norm and head; gives the loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


COLUMNS = ("attn.q", "attn.k", "attn.v", "up")
ROWS = ("attn.o", "down")


def cut_by_torch(model: GPT, mesh: DeviceMesh) -> None:
    """Torch's modules. They do not change the number of heads, so that is done here."""
    plan = {name: ColwiseParallel() for name in COLUMNS} | {
        name: RowwiseParallel() for name in ROWS
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
        block.attn.n_head //= mesh.size()


def cut_by_zeroshard(model: GPT, mesh: DeviceMesh) -> None:
    """Our modules, for the same layers."""
    tensor_parallel(
        model,
        mesh,
        {f"blocks.*.{name}": "colwise" for name in COLUMNS}
        | {f"blocks.*.{name}": "rowwise" for name in ROWS},
    )


CUTS: dict[str, Callable[[GPT, DeviceMesh], None]] = {
    "torch's modules": cut_by_torch,
    "ZeroShard's modules": cut_by_zeroshard,
}


def plain_loop(model: GPT) -> Callable[[Tensor], None]:
    """One step of a loop with torch's AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(ids: Tensor) -> None:
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_loop(model: GPT) -> Callable[[Tensor], None]:
    """One step of an engine at stage 1, over one data rank."""
    engine = zeroshard.Engine(
        model,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 1},
            "units": ["Block"],
            "log_level": "warning",
        },
        mesh=Mesh(tensor=RANKS),
    )

    def step(ids: Tensor) -> None:
        engine.backward(engine(ids))
        engine.step()

    return step


LOOPS = {"plain loop": plain_loop, "engine": engine_loop}


@dataclass
class Line:
    """One system. ``cpu_s`` and ``wall_s``: of each measured step."""

    step: Callable[[Tensor], None]
    ids: Tensor
    cpu_s: list[float] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)

    def take(self, steps: int, *, timed: bool = True) -> None:
        """Train ``steps`` steps."""
        for _ in range(steps):
            wall, cpu = time.perf_counter(), time.process_time()
            self.step(self.ids)
            if timed:
                self.cpu_s.append(time.process_time() - cpu)
                self.wall_s.append(time.perf_counter() - wall)


def measure(
    loops: Sequence[str], *, width: int, depth: int, warm_up: int, rounds: int, burst: int
) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step, by ``"<loop>, <cut>"``. Needs a fake process group."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    lines: dict[str, Line] = {}
    for loop in loops:
        for cut, apply in CUTS.items():
            torch.manual_seed(0)
            model = GPT(width, depth)
            apply(model, mesh)
            line = Line(LOOPS[loop](model), torch.randint(VOCABULARY, (BATCH, LENGTH)))
            line.take(warm_up, timed=False)
            lines[f"{loop}, {cut}"] = line
    for _, name in alternating(list(lines), rounds):
        lines[name].take(1, timed=False)  # the caches are those of another system
        lines[name].take(burst)
    return {
        name: {"cpu_ms": 1e3 * median(line.cpu_s), "wall_ms": 1e3 * median(line.wall_s)}
        for name, line in lines.items()
    }


def ratios(found: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Time with our modules ÷ time with torch's, by loop and clock."""
    torchs, ours = CUTS
    loops = dict.fromkeys(name.rpartition(", ")[0] for name in found)
    return {
        loop: {
            clock: found[f"{loop}, {ours}"][clock] / found[f"{loop}, {torchs}"][clock]
            for clock in ("cpu_ms", "wall_ms")
        }
        for loop in loops
    }


def main() -> None:
    """Measure, print a table, and write the numbers to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--smoke", action="store_true", help="tiny, to test the program")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    depth, warm_up, rounds, burst = (1, 1, 1, 2) if options.smoke else (8, 5, options.rounds, 5)
    found = measure(
        list(LOOPS),
        width=options.width, depth=depth, warm_up=warm_up, rounds=rounds, burst=burst,
    )  # fmt: skip
    print(
        f"milliseconds per step, {depth} blocks of width {options.width}, {RANKS} fake tensor ranks"
    )
    for name, line in found.items():
        print(f"{name:36}  CPU {line['cpu_ms']:7.2f}  wall {line['wall_ms']:7.2f}")
    for loop, ratio in ratios(found).items():
        print(
            f"{loop}: ZeroShard's ÷ torch's  CPU {ratio['cpu_ms']:.2f}  wall {ratio['wall_ms']:.2f}"
            f"  (target {TARGET})"
        )
    if options.json:
        result = {
            "width": options.width,
            "depth": depth,
            "machine": describe(),
            "ms_per_step": found,
            "ratios": ratios(found),
        }
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
