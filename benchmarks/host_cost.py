"""Measures what sharding costs the host: CPU time per unit and step beyond that of the plain loop.

    python benchmarks/host_cost.py [--rounds N] [--smoke]

One process pretends to be rank 0 of eight: torch's fake process group has all calls of a real one. The
model has 24 blocks of ten very small parameters, so kernels take almost no time, and what remains is what
a library does on the host for each unit. On a GPU this time is visible when batches are small, because
kernels cannot be launched faster than the host prepares them.

The systems take turns in one process, on one thread. *Own* time is the median CPU time of a step minus
that of the plain loop, divided by the number of blocks. The number of blocks is not needed to compare
two systems; it makes numbers of different models comparable. The clock of a processor changes within a
run, so a ratio of two systems is taken in each round, and the median of the rounds is given.

The fake group gives every rank the values of this one: it copies each tensor of a collective as often as
there are ranks, one small copy after the other. No library does that, and no real group. So the time
inside its collectives is measured too (*group*), and ratios are given with it and without it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median, quantiles

import torch
import torch.distributed as dist
from interleaving import alternating
from systems import Trainer, fsdp2, plain, zeroshard
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 8
WIDTH = 64
"""Of the matrices. The shards of a matrix of this size need no padding, as those of a real model."""
PHASES = ("forward", "backward", "step")
GROUP = "group"
"""In results: the time inside the calls of the fake group, which is a part of the phases."""
COLLECTIVES = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
)
"""The methods of a process group that start the collectives of these systems, old names and new ones."""
APART = "stage 3, matrices apart"
"""The line on which each matrix of a block is a unit, as in blocks of large models on an accelerator."""
TARGETS = {"ZeroShard stage 2": 0.2, "ZeroShard stage 3": 0.2, APART: 0.35}
"""The greatest accepted own time of each line ÷ that of FSDP2."""

Found = dict[str, dict[str, float]]
"""Microseconds per block and step, by line and phase."""


class Block(nn.Module):
    """Five linear layers with biases: ten parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tower(nn.Module):
    """Blocks one after the other, and a squared error."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def groups(self) -> list[nn.Module]:
        """Every block by itself."""
        return [*self.blocks]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x.float() - y.float()).square().mean()


def _nothing() -> None:
    """A CPU has done its work when a call returns."""


@dataclass
class InGroup:
    """Adds up the seconds of ``clock`` inside the collectives of all process groups."""

    clock: Callable[[], float] = time.process_time
    seconds: float = 0.0
    _is_inside: bool = False

    def attach(self) -> None:
        """To be called before the systems are built. It stays for the whole process."""
        for name in COLLECTIVES:
            if (method := getattr(dist.ProcessGroup, name, None)) is not None:
                setattr(dist.ProcessGroup, name, self._timed(method))

    def _timed(self, method: Callable[..., object]) -> Callable[..., object]:
        clock = self.clock

        def call(*args: object, **options: object) -> object:
            if self._is_inside:  # an old name calls the new one
                return method(*args, **options)
            self._is_inside, begin = True, clock()
            try:
                return method(*args, **options)
            finally:
                self.seconds += clock() - begin
                self._is_inside = False

        return call


@dataclass
class Turns:
    """The steps of one system in one round. ``seconds``: of ``clock`` for each step, by phase.

    ``settle``: waits for a device, before steps that are timed.
    """

    trainer: Trainer
    x: Tensor
    y: Tensor
    clock: Callable[[], float] = time.process_time
    settle: Callable[[], None] = _nothing
    group: InGroup = field(default_factory=InGroup)
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in (*PHASES, GROUP)}
    )

    def take(self, steps: int, *, timed: bool = True) -> None:
        """Train ``steps`` steps."""
        clock = self.clock
        self.settle()
        for _ in range(steps):
            in_group, begin = self.group.seconds, clock()
            loss = self.trainer.forward(self.x, self.y)
            after_forward = clock()
            self.trainer.backward(loss)
            after_backward = clock()
            self.trainer.step()
            end = clock()
            del loss
            if timed:
                parts = (
                    after_forward - begin,
                    after_backward - after_forward,
                    end - after_backward,
                )
                for phase, seconds in zip(PHASES, parts, strict=True):
                    self.seconds[phase].append(seconds)
                self.seconds[GROUP].append(self.group.seconds - in_group)

    def us_per_block(self, depth: int) -> dict[str, float]:
        """Median microseconds per block since the last call, by phase and in all (of whole steps)."""
        found = {phase: median(values) for phase, values in self.seconds.items()}
        phases = [self.seconds[phase] for phase in PHASES]
        found["all"] = median(map(sum, zip(*phases, strict=True)))
        for values in self.seconds.values():
            values.clear()
        return {phase: seconds * 1e6 / depth for phase, seconds in found.items()}


def systems() -> dict[str, Callable[[nn.Module], Trainer]]:
    """A function for each line that builds it from a model. All train in bf16 with fp32 masters."""
    wrapped = {"units": ["Block"], "unit_min_numel": 0}
    lines = {
        "plain loop": plain(fused=True),
        "FSDP2, not resharded": fsdp2(False),
        "FSDP2, resharded": fsdp2(True),
        "ZeroShard stage 2": zeroshard(2, **wrapped),
        "ZeroShard stage 3": zeroshard(3, **wrapped),
        APART: zeroshard(3, **wrapped, block_max_numel=1 << 40, unit_max_numel=1),
    }
    return {name: lambda model, build=build: build(model, 1) for name, build in lines.items()}


def measure(
    names: Sequence[str],
    *,
    depth: int,
    width: int,
    warm_up: int,
    rounds: int,
    burst: int,
    builders: Mapping[str, Callable[[nn.Module], Trainer]] | None = None,
    device: str = "cpu",
    clock: Callable[[], float] = time.process_time,
    settle: Callable[[], None] = _nothing,
    group: InGroup | None = None,
) -> list[Found]:
    """The medians of each round. Needs a process group.

    ``builders``: of the lines, by default :func:`systems`. ``clock``, ``settle``: see :class:`Turns`.
    ``group``: attached; without it :data:`GROUP` is 0.
    """
    turns = {}
    builders = systems() if builders is None else builders
    for name in names:
        torch.manual_seed(0)
        x, y = torch.randn(2, 4, width).bfloat16().to(device)
        model = Tower(depth, width).to(device)
        turns[name] = Turns(builders[name](model), x, y, clock, settle, group or InGroup())
        turns[name].take(warm_up, timed=False)
    found: list[Found] = [{} for _ in range(rounds)]
    for number, name in alternating(list(turns), rounds):
        turns[name].take(1, timed=False)  # the caches are those of another system
        turns[name].take(burst)
        found[number][name] = turns[name].us_per_block(depth)
    for name, line in turns.items():
        norm = line.trainer.norm()
        if norm is None or not isfinite(norm):  # a step may then have been skipped
            raise RuntimeError(f"{name}: the gradient's norm is {norm}; run the program again")
        line.trainer.close()
    return found


def middle(found: Sequence[Found]) -> Found:
    """The median of the rounds, by line and phase."""
    return {
        name: {phase: median(each[name][phase] for each in found) for phase in line}
        for name, line in found[0].items()
    }


def own(found: Found) -> Found:
    """Microseconds beyond those of the plain loop, by line and phase."""
    base = found["plain loop"]
    return {
        name: {phase: value - base[phase] for phase, value in line.items()}
        for name, line in found.items()
        if name != "plain loop"
    }


PEER_OF = {
    "ZeroShard stage 2": "FSDP2, not resharded",
    "ZeroShard stage 3": "FSDP2, resharded",
    APART: "FSDP2, resharded",
}


def ratios(found: Sequence[Found], *, but_group: bool = False) -> dict[str, list[float]]:
    """Own time of each ZeroShard line ÷ that of the FSDP2 line that holds the same state, by round.

    ``but_group``: without the time inside the calls of the fake group.
    """
    ours: dict[str, list[float]] = {}
    for each in map(own, found):
        times = {name: t["all"] - (t[GROUP] if but_group else 0.0) for name, t in each.items()}
        for name, peer in PEER_OF.items():
            if {name, peer} <= times.keys():
                ours.setdefault(name, []).append(times[name] / times[peer])
    return ours


def _told(values: Sequence[float]) -> str:
    """The median of the rounds, and the quarter and three quarters of them."""
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (*values,) * 3
    return f"{median(values):.3f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Measure, print a table, and write the numbers to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--smoke", action="store_true", help="tiny, to test the program")
    parser.add_argument("--only", nargs="*", help="lines to measure, besides the plain loop")
    parser.add_argument("--json", help="write the numbers to this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # a fake all-gather leaves what was in memory
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    depth, width = (3, 8) if options.smoke else (24, WIDTH)
    warm_up, rounds, burst = (2, 2, 2) if options.smoke else (5, options.rounds, 5)
    names = list(systems())
    if options.only is not None:
        names = [name for name in names if name == "plain loop" or name in options.only]
    group = InGroup()
    group.attach()
    by_round = measure(
        names, depth=depth, width=width, warm_up=warm_up, rounds=rounds, burst=burst, group=group
    )
    found = middle(by_round)
    extra = own(found)
    columns = (*PHASES, "all", GROUP)
    print(f"microseconds of CPU time per block and step, {depth} blocks, {RANKS} fake ranks")
    print(f"{'':24}" + "".join(f"{column:>10}" for column in columns) + f"{'own':>10}")
    for name, line in found.items():
        values = "".join(f"{line[column]:10.0f}" for column in columns)
        print(f"{name:24}{values}" + (f"{extra[name]['all']:10.0f}" if name in extra else ""))
    whole, without = ratios(by_round), ratios(by_round, but_group=True)
    for name, values in whole.items():
        print(
            f"own time, {name} ÷ {PEER_OF[name]}: {_told(values)}, without the group "
            f"{_told(without[name])} (target {TARGETS[name]:.2f})"
        )
    if options.json:
        result = {
            "us_per_block": found,
            "own_us": extra,
            "ratios": {name: median(values) for name, values in whole.items()},
            "ratios_without_group": {name: median(values) for name, values in without.items()},
        }
        with open(options.json, "w") as file:
            json.dump(result, file)
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
