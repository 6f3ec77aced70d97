"""Counts what a step at stage 3 starts, and when, for Llama; writes the table of ``docs/gpu.md``.

    python tools/overlap.py            # prints the table; takes some minutes of CPU
    python tools/overlap.py --write    # and puts it into the page

The engine trains with fake tensors, as ``zeroshard plan`` does: as one rank of 8 H100s, in bf16, with
AdamW and clipping, on one sample of 2,048 tokens. *Launches* are collectives of a step; a group of units
makes one. *Operators* are those of forward and backward that a plain loop does not have, for each layer:
what the device computes or copies, so no views and no allocations.
Needs Transformers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from plan_published import BF16, PAGE, put, simulated
from published_models import Build, Inputs, llama
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.config.machine_file import load_machine
from zeroshard.core.mesh import Mesh
from zeroshard.planner.fakes import fake_tensors
from zeroshard.planner.gpu_kernels import kernels_of
from zeroshard.planner.simulate import Simulation
from zeroshard.planner.step_log import Begun, Ended, Operation
from zeroshard.planner.step_time import step_time
from zeroshard.planner.work import Work, work_of

GPU_PAGE = PAGE.with_name("gpu.md")
TABLE = "overlap.py: table"
RANKS, TOKENS = 8, 2048

AUTO = {f"stage3_{key}": "auto" for key in ("prefetch_bucket_size", "param_persistence_threshold")}
SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "default": {},
    '"auto"': {"reduce_bucket_size": "auto", **AUTO},
    "often used": {
        "reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 500_000_000,
        "stage3_max_live_parameters": 1_000_000_000, "stage3_max_reuse_distance": 1_000_000_000,
    },
    "0 and 1": {
        "reduce_bucket_size": 1, "stage3_prefetch_bucket_size": 1, "stage3_max_live_parameters": 1,
    },
})  # fmt: skip
"""Keys of ``zero_optimization``."""
LAYERS: Mapping[str, int] = MappingProxyType({"1B": 16, "8B": 32, "70B": 80})


@dataclass(frozen=True)
class Counts:
    """Of one step. ``late``: names of all-gathers that are needed when they begin, but for those before
    anything is computed.

    ``launches``: collectives. ``operators``: of forward and backward, without collectives.
    """

    launches: int
    late: tuple[str, ...]
    operators: int
    exposed_s: float
    total_s: float


def _does_work(work: Work) -> bool:
    """Whether the device computes or copies: no view, and no allocation."""
    return work.nbytes > 0 and not work.op.startswith(("empty", "new_empty"))


def is_gather(event: Ended) -> bool:
    """Whether what has ended is the all-gather of parameters."""
    return ": all_gather " in event.key


def counted(found: Simulation) -> Counts:
    """What the events of a step say."""
    launches, operators, late = 0, 0, []
    worked = 0  # operations so far
    begun: dict[str, int] = {}
    for event in found.events:
        if isinstance(event, Operation):
            worked += _does_work(event.work)
            operators += event.phase != "step" and _does_work(event.work)
        elif isinstance(event, Begun) and event.ranks:
            launches += event.nbytes > 1024  # no norm, flag or loss
            begun[event.key] = worked
        elif isinstance(event, Ended) and 0 < worked == begun.get(event.key) and is_gather(event):
            late.append(event.key)
    timed = step_time(found, load_machine("h100"), samples=RANKS, tokens=RANKS * TOKENS)
    exposed_s = sum(timed.timing.exposed_s.values())
    return Counts(launches, tuple(late), operators, exposed_s, timed.total_s)


def step_of(
    model: tuple[Build, Inputs], stage: int, ranks: int, sizes: Mapping[str, Any]
) -> Counts:
    """One step of a rank."""
    keys = dict(sizes)
    return counted(simulated(model, 1, Mesh(data_shard=ranks), stage, BF16, keys, with_events=True))


class _Operators(TorchDispatchMode):
    """Counts operators."""

    count: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += func.namespace == "aten" and _does_work(work_of(func, args, result))
        return result


def of_a_plain_loop(model: tuple[Build, Inputs]) -> int:
    """Operators of a forward and a backward without an engine."""
    build, batch = model
    with kernels_of("cuda"), fake_tensors():
        made = build()
        inputs = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in batch.items()}
        with _Operators() as counter:
            made(**inputs).loss.backward()
    return int(counter.count)


def operators_per_layer(size: str, stage: int, sizes: Mapping[str, Any]) -> float:
    """Operators of forward and backward for each layer that a plain loop does not have."""
    few, many = (llama(1, TOKENS, size=size, layers=layers) for layers in (2, 4))
    own, less = (step_of(model, stage, RANKS, sizes).operators for model in (many, few))
    return (own - less - (of_a_plain_loop(many) - of_a_plain_loop(few))) / 2


def row(size: str, name: str, layers: int | None = None) -> list[str]:
    """A row of the table."""
    layers = layers or LAYERS[size]
    found = step_of(llama(1, TOKENS, size=size, layers=layers), 3, RANKS, SIZES[name])
    over = operators_per_layer(size, 3, SIZES[name])
    return [
        size, name, f"{found.launches} ({3 * layers + 6})", f"{over:g}", str(len(found.late)),
        f"{found.exposed_s * 1e3:.1f} of {found.total_s * 1e3:.1f}",
    ]  # fmt: skip


def table(names: Sequence[str] = tuple(SIZES)) -> list[str]:
    """The lines of the table."""
    lines = [
        "| Llama | sizes | launches (3 for each layer + 6) | operators over plain, a layer | "
        "late gathers | exposed, ms |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for size in LAYERS:
        for name in names:
            lines.append(f"| {' | '.join(row(size, name))} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Count all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into the page")
    write = parser.parse_args().write
    lines = table()
    print("\n".join(lines))
    if write:
        GPU_PAGE.write_text(put(GPU_PAGE.read_text(), TABLE, lines))


if __name__ == "__main__":
    main()
