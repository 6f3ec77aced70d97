"""Plans published runs, and writes the tables of ``docs/plan-published.md``.

    python tools/plan_published.py            # prints the tables; takes some minutes of CPU
    python tools/plan_published.py --write    # and puts them into the page

Sources are named on the page. Models have the published sizes and no weights (``published_models.py``);
tensors are fake, and operations are those of a GPU. Needs Transformers.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from published_models import (
    Build,
    Inputs,
    blenderbot,
    deberta,
    deberta_96,
    gpt2_xl,
    llama,
    llama_8b,
    llava,
)
from torch import nn

from zeroshard.config.machine_file import load_machine
from zeroshard.core.mesh import Mesh
from zeroshard.planner.model_source import loss_of
from zeroshard.planner.simulate import simulate
from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_time import stage_times
from zeroshard.zero import Init

PAGE = Path(__file__).parents[1] / "docs/plan-published.md"
BATCHES, LLAMA, A100, LLAVA, COST = (
    f"plan_published.py: {name}" for name in ("batches", "Llama", "A100", "LLaVA", "cost")
)

CARD_NBYTES = 24 * 2**30
CONTEXT_NBYTES = 1_300_000_000
"""Of the card, for the context and libraries of CUDA: assumed."""

DDP_NBYTES = 20
"""Per parameter in PyTorch's DDP in fp32: parameter, gradient, the gradient's copy in a bucket, AdamW."""

FP16 = {"fp16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
BF16 = {"bf16": {"enabled": True}}
TO_HOST = {"device": "cpu", "pin_memory": True}


@dataclass(frozen=True)
class Row:
    """One published run. ``published``: samples of the largest micro-batch; 0: none fits; None: nothing
    is published. ``ddp``: state is that of PyTorch's DDP, by formula; the rest is that of the plan."""

    model: str
    how: str
    make: Callable[[int], tuple[Build, Inputs]]
    published: int | None
    stage: int
    keys: Mapping[str, Any]
    zero: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    ddp: bool = False


ROWS = (
    Row("DeBERTa-v2-xlarge", "DDP", deberta, 8, 0, AUTOCAST, ddp=True),
    Row("DeBERTa-v2-xlarge", "stage 0", deberta, None, 0, AUTOCAST),
    Row("DeBERTa-v2-xlarge", "stage 2", deberta, 40, 2, FP16),
    Row("DeBERTa-v2-xlarge", "stage 2, 96 tokens", deberta_96, 40, 2, FP16),
    Row("Blenderbot-400M", "DDP", blenderbot, 100, 0, AUTOCAST, ddp=True),
    Row("Blenderbot-400M", "stage 0", blenderbot, None, 0, AUTOCAST),
    Row("Blenderbot-400M", "stage 2", blenderbot, 200, 2, FP16),
    Row("GPT-2 XL", "DDP", gpt2_xl, 0, 0, AUTOCAST, ranks=1, ddp=True),
    Row(
        "GPT-2 XL", "stage 3, all in host memory", gpt2_xl, 16, 3, FP16,
        {"offload_optimizer": TO_HOST, "offload_param": TO_HOST},
    ),
)  # fmt: skip


def plan(row: Row, samples: int) -> Simulation:
    """One rank of a row with this micro-batch."""
    return simulated(
        row.make(samples), samples, Mesh(data_shard=row.ranks), row.stage, {**row.keys}, row.zero
    )


def simulated(
    made: tuple[Build, Inputs],
    samples: int,
    mesh: Mesh,
    stage: int,
    keys: Mapping[str, Any],
    zero: Mapping[str, Any] | None = None,
    *,
    with_events: bool = False,
) -> Simulation:
    """Rank 0 of ``mesh``, with AdamW and clipping."""
    build, batch = made
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **(zero or {})},
        **keys,
    }
    return simulate(
        sharded(build) if stage == 3 else build, config, (batch, None),
        mesh=mesh, rank=0, loss_fn=loss_of, target="cuda", with_events=with_events,
    )  # fmt: skip


def sharded(build: Build) -> Build:
    """``build`` under ``zero.Init``."""

    def made() -> nn.Module:
        with Init():
            return build()

    return made


class Need(NamedTuple):
    """Bytes of a rank on its device: as planned, and with the state of PyTorch's DDP."""

    planned: int
    ddp: int


class Needs:
    """What rows need. Rows of one model and stage share their simulations."""

    def __init__(self) -> None:
        self._found: dict[tuple[Any, int, int], Need] = {}

    def __call__(self, row: Row, samples: int) -> int:
        """Bytes of a row with this micro-batch."""
        key = row.make, row.stage, samples
        if key not in self._found:
            found = plan(row, samples)
            ddp = DDP_NBYTES * found.params_numel + found.activations_nbytes
            self._found[key] = Need(found.peak_nbytes, ddp)
        return self._found[key].ddp if row.ddp else self._found[key].planned


def batches(rows: Sequence[Row] = ROWS) -> list[str]:
    """The table of the largest micro-batches."""
    limit = CARD_NBYTES - CONTEXT_NBYTES
    lines = [
        "| model | how | ranks | published | planned | off | one sample, GB | this, GB | one more, GB |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    needs = Needs()
    for row in rows:

        def peak(samples: int, row: Row = row) -> int:
            return needs(row, samples)

        found = largest(peak, limit, near=row.published or 8)
        sizes = [1, found, found + 1] if found else [1]
        cells = [f"{peak(samples) / 1e9:.2f}" for samples in sizes] + [""] * (3 - len(sizes))
        published = "" if row.published is None else row.published or "none"
        distance = "" if row.published is None else off(row.published, found)
        lines.append(
            f"| {row.model} | {row.how} | {row.ranks} | {published} | {found or 'none'} | {distance} | "
            f"{' | '.join(cells)} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def largest(peak: Callable[[int], int], limit: int, *, near: int) -> int:
    """The most samples that fit; 0 if one does not. ``near``: where to look for the slope of the peak."""
    if peak(1) > limit:
        return 0
    low, high = max(1, near // 2), near
    slope = (peak(high) - peak(low)) / (high - low)
    found = max(1, high + int((limit - peak(high)) // slope))
    while peak(found) > limit:
        found -= 1
    while peak(found + 1) <= limit:
        found += 1
    return found


def off(published: float, planned: float) -> str:
    """How far the planned number is above the published one."""
    return f"{planned / published - 1:+.0%}" if published else "0" if not planned else "wrong"


class LlamaRow(NamedTuple):
    """A published run on H100s of 96 GB: tokens per second of one GPU, and GiB of its memory."""

    gpus: int
    tokens: int
    gib: float


LLAMAS = (LlamaRow(8, 5762, 82.4), LlamaRow(128, 5605, 67.0))


def llamas(rows: Sequence[LlamaRow] = LLAMAS) -> list[str]:
    """The table of Llama 3.1 8B: eager FSDP, two samples of 8,192 tokens on each GPU."""
    lines = [
        "| GPUs | activation checkpointing | tokens/s of a GPU | GiB | state, GiB |",
        "|--:|---|--:|--:|--:|",
    ]
    machine = load_machine("h100")
    for gpus, tokens, gib in rows:
        lines.append(f"| {gpus} | of some operations: published | {tokens:,} | {gib:.1f} | |")
        for checkpointed in (False, True):
            made = llama_8b(2, checkpointed=checkpointed)
            found = simulated(made, 2, Mesh(data_shard=gpus), 3, BF16, with_events=True)
            timed = stage_times([found], machine, samples=2 * gpus, tokens=2 * gpus * 8192)[0]
            state = sum(
                found.nbytes(category)
                for category in ("parameters", "gradients", "master", "optimizer")
            )
            lines.append(
                f"| {gpus} | {'of every layer' if checkpointed else 'none'}: planned | "
                f"{timed.tokens / timed.total_s / gpus:,.0f} | {found.peak_nbytes / 2**30:.1f} | "
                f"{state / 2**30:.1f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


class A100Row(NamedTuple):
    """A published run of Llama on 64 A100s of 80 GB. ``tokens``: per second of one GPU."""

    name: str
    size: str
    layers: int
    samples: int
    length: int
    checkpointed: bool
    tokens: int


A100S = (
    A100Row("Llama 2 13B", "13B", 40, 2, 4096, False, 2162),
    A100Row("Llama 2 70B", "70B of Llama 2", 80, 2, 4096, True, 353),
    A100Row("Llama 3 70B", "70B", 80, 1, 8192, True, 331),
)


def a100s(rows: Sequence[A100Row] = A100S, gpus: int = 64) -> list[str]:
    """The table of Llama on 64 A100s: FSDP2, as published and as planned."""
    lines = [
        "| model | samples of a GPU | tokens of each | checkpointing | tokens/s of a GPU: published "
        "| planned | off | planned, GiB |",
        "|---|--:|--:|---|--:|--:|--:|--:|",
    ]
    machine = load_machine("a100")
    for name, size, layers, samples, length, checkpointed, published in rows:
        made = llama(samples, length, size=size, layers=layers, checkpointed=checkpointed)
        found = simulated(made, samples, Mesh(data_shard=gpus), 3, BF16, with_events=True)
        tokens = samples * length * gpus
        timed = stage_times([found], machine, samples=samples * gpus, tokens=tokens)[0]
        planned = tokens / timed.total_s / gpus
        lines.append(
            f"| {name} | {samples} | {length:,} | {'every layer' if checkpointed else 'none'} | "
            f"{published:,} | {planned:,.0f} | {off(published, planned)} | "
            f"{found.peak_nbytes / 2**30:.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


class LlavaRow(NamedTuple):
    """A published run of LLaVA-1.5 on eight cards, 16 samples on each.

    ``hours``: for the 665 thousand samples of its data; None: not published.
    """

    name: str
    cards: str
    gib: int
    hours: int | None
    made: tuple[Build, Inputs]


SAMPLES = 665_000
LLAVAS = (
    LlavaRow("7B", "A100", 40, 10, llava(16, size="7B")),
    LlavaRow("13B", "A100", 80, 20, llava(16, size="13B")),
    LlavaRow("13B, LoRA", "A6000", 48, None, llava(16, size="13B", lora=True)),
    LlavaRow("13B, projector last", "A100", 80, None, llava(16, size="13B", projector_last=True)),
)


def llavas(rows: Sequence[LlavaRow] = LLAVAS) -> list[str]:
    """The table of LLaVA-1.5."""
    lines = [
        "| model | eight cards | published, hours | planned, hours | off | planned, GiB |",
        "|---|---|--:|--:|--:|--:|",
    ]
    machine = load_machine("a100")
    for row in rows:
        found = simulated(
            row.made, 16, Mesh(data_shard=8), 3, BF16, with_events=row.hours is not None
        )
        hours = ["", "", ""]
        if row.hours is not None:
            step_s = stage_times([found], machine, samples=128, tokens=128 * 2048)[0].total_s
            planned = step_s * SAMPLES / 128 / 3600
            hours = [str(row.hours), f"{planned:.1f}", off(row.hours, planned)]
        lines.append(
            f"| {row.name} | {row.cards}, {row.gib} GB | {' | '.join(hours)} | "
            f"{found.peak_nbytes / 2**30:.1f} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


MAKERS: dict[str, Callable[[], list[str]]] = {
    "batches": batches, "Llama": llamas, "A100": a100s, "LLaVA": llavas
}  # fmt: skip


def put(page: str, name: str, lines: list[str]) -> str:
    """The page with a table between its marks."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, after = page.split(begin, maxsplit=1)[0], page.split(end)[1]
    return "\n".join([f"{before}{begin}", *lines, f"{end}{after}"])


def cost() -> list[str]:
    """What this process needed so far."""
    rss_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        f"The tool took {time.process_time():.0f} s of CPU in one process, whose memory was at most "
        f"{rss_gib:.2f} GiB."
    ]


def main() -> None:
    """Plan all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    parser.add_argument("--only", choices=MAKERS, help="one table, without what it costs")
    options = parser.parse_args()
    write = options.write
    tables = (
        {f"plan_published.py: {options.only}": MAKERS[options.only]()}
        if options.only
        else {f"plan_published.py: {name}": make() for name, make in MAKERS.items()}
    )
    if not options.only:
        tables[COST] = cost()
    page = PAGE.read_text() if write else ""
    for name, lines in tables.items():
        print("\n".join(lines))
        if write:
            page = put(page, name, lines)
    if write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
