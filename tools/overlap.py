"""Counts what a step at stage 3 starts, and when, for Llama; writes the table of ``docs/gpu.md``.

    python tools/overlap.py            # prints the table; takes some minutes of CPU
    python tools/overlap.py --write    # and puts it into the page
    python tools/overlap.py --goals    # prints the times of six steps beside the times to be reached

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
from typing import Any, NamedTuple

import torch
from plan_published import BF16, PAGE, put, simulated
from published_models import Build, Inputs, llama
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.config.machine_file import load_machine
from zeroshard.core.mesh import Mesh
from zeroshard.planner.fakes import fake_tensors, rows_as_in
from zeroshard.planner.gpu_kernels import kernels_of
from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_log import Begun, Ended, Operation, Work, work_of
from zeroshard.planner.step_time import stage_times

GPU_PAGE = PAGE.with_name("gpu.md")
TABLE = "overlap.py: table"
REDUCTION = "reduce-scatter"
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
    exposed_s: Mapping[str, float]  # by kind
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
    timed = stage_times([found], load_machine("h100"), samples=RANKS, tokens=RANKS * TOKENS)[0]
    return Counts(launches, tuple(late), operators, timed.timing.exposed_s, timed.total_s)


def step_of(
    model: tuple[Build, Inputs],
    stage: int,
    ranks: int,
    sizes: Mapping[str, Any],
    keys: Mapping[str, Any] = BF16,
) -> Counts:
    """One step of a rank."""
    mesh = Mesh(data_shard=ranks)
    return counted(simulated(model, 1, mesh, stage, keys, sizes, with_events=True))


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
    with kernels_of("cuda"), fake_tensors(), rows_as_in(batch):
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
        f"{sum(found.exposed_s.values()) * 1e3:.1f} of {found.total_s * 1e3:.1f}",
    ]  # fmt: skip


class Goal(NamedTuple):
    """A step that took ``before_ms`` when modules above the sizes were not prefetched, and layers of 3 B
    parameters and more were cut. ``exposed``: only what is exposed of this kind; "": the whole step."""

    text: str
    size: str
    layers: int
    before_ms: float
    limit_ms: float
    stage: int = 3
    sizes: str = "default"
    exposed: str = ""
    units: tuple[str, ...] = ()


GOALS = (
    Goal("8B, 6 layers", "8B", 6, 77.2, 66.5),
    Goal("1B", "1B", 16, 62.4, 53.2),
    Goal('7B, 6 layers, "auto"', "7B", 6, 64.0, 44.0, sizes='"auto"'),
    Goal("8B, 6 layers, blocks as units", "8B", 6, 80.9, 67.0, units=("LlamaDecoderLayer",)),
    Goal('7B, 6 layers, stage 2, "auto": reductions', "7B", 6, 6.8, 0.7, 2, '"auto"', REDUCTION),
    Goal("8B, 6 layers: reductions", "8B", 6, 13.2, 5.2, exposed=REDUCTION),
)


def reached_ms(goal: Goal) -> float:
    """What the planner says today, in milliseconds."""
    keys = {**BF16, **({"units": list(goal.units)} if goal.units else {})}
    model = llama(1, TOKENS, size=goal.size, layers=goal.layers)
    found = step_of(model, goal.stage, RANKS, SIZES[goal.sizes], keys)
    return 1e3 * (found.exposed_s.get(goal.exposed, 0.0) if goal.exposed else found.total_s)


def goals() -> list[str]:
    """The lines of the second table."""
    lines = ["| step | before, ms | goal, ms | now, ms |", "|---|--:|--:|--:|"]
    for goal in GOALS:
        before, limit, now = goal.before_ms, goal.limit_ms, reached_ms(goal)
        lines.append(f"| {goal.text} | {before:.1f} | {limit:.1f} | {now:.1f} |")
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


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
    parser.add_argument(
        "--goals", action="store_true", help="print what steps took, and should take"
    )
    options = parser.parse_args()
    lines = goals() if options.goals else table()
    print("\n".join(lines))
    if options.write and not options.goals:
        GPU_PAGE.write_text(put(GPU_PAGE.read_text(), TABLE, lines))


if __name__ == "__main__":
    main()
