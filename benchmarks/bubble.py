"""Measures how long the ranks of a pipeline wait, and compares it with the formula.

    python benchmarks/bubble.py [--rounds N] [--out FILE]

Four ranks train a pipeline whose stages sleep: a forward and a backward of a micro-batch take equally
long. Sleeping needs no core, so the numbers do not depend on how many cores there are, or on other load.
The *bubble* of a rank is the part of the wall time of ``train_batch()`` in which it does not sleep. It
contains everything else too: messages, the exchange of the norm and the update.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from interleaving import WorkerGroup, interleaved, running
from machine import describe

RANKS, MICRO_BATCHES = 4, 8
TARGET = 0.05
"""The greatest accepted difference between measured and computed bubble, relative to the latter."""

SCHEDULES = {"1F1B": 1, "GPipe": 1, "Interleaved1F1B": 2, "LoopedBFS": 2}
"""Schedules and their pipeline stages per rank."""


@dataclass(frozen=True)
class SleepingPipeline:
    """A job: one pipeline of sleeping stages. ``sleep_s``: of a rank in a forward of a micro-batch."""

    schedule: str
    per_rank: int
    sleep_s: float

    def prepare(self) -> None:
        """Import the engine."""
        import zeroshard.engine.initialize

        assert zeroshard.engine.initialize

    def open(self, rank: int) -> Session:
        """Build the engine of one rank."""
        return Session(self)


class Session:
    """One rank of the pipeline."""

    def __init__(self, job: SleepingPipeline) -> None:
        import torch
        from torch import Tensor, nn

        import zeroshard

        slept = self.slept = [0.0]
        duration_s = job.sleep_s / job.per_rank

        def sleep() -> None:
            begun_s = time.perf_counter()
            time.sleep(duration_s)
            slept[0] += time.perf_counter() - begun_s

        class Asleep(torch.autograd.Function):
            """Sleeps in forward and in backward."""

            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                del ctx
                sleep()
                return x.view_as(x)

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
                del ctx
                sleep()
                return grad

        class Stage(nn.Module):
            """A small layer that takes long. The sleep comes first, so backward ends with it."""

            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(8, 8)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.layer(Asleep.apply(x * self.layer.weight[0, 0]))
                return y

        torch.manual_seed(0)
        stages = RANKS * job.per_rank
        model = zeroshard.parallel.pipeline(
            nn.Sequential(*(Stage() for _ in range(stages))),
            split=[str(at) for at in range(1, stages)],
            loss_fn=nn.functional.mse_loss,
            schedule=job.schedule,
        )
        self.engine = zeroshard.Engine(
            model,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage": 1},
                "parallel": {"pipeline": RANKS},
            },
        )
        self.batches = [(torch.randn(2, 8), torch.randn(2, 8)) for _ in range(MICRO_BATCHES)]

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """Seconds slept, and wall seconds, of each step."""
        found = []
        for _ in range(steps):
            self.slept[0] = 0.0
            begun_s = time.perf_counter()
            self.engine.train_batch(iter(self.batches))
            found.append((self.slept[0], time.perf_counter() - begun_s))
        return found

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def computed(per_rank: int) -> float:
    """``(p - 1) / (v M + p - 1)``."""
    return (RANKS - 1) / (per_rank * MICRO_BATCHES + RANKS - 1)


def measure(rounds: int, sleep_s: float) -> dict[str, dict[str, float]]:
    """The bubble of each schedule: the median over steps of the mean over ranks."""
    groups = [
        WorkerGroup(name, SleepingPipeline(name, per_rank, sleep_s), ranks=RANKS)
        for name, per_rank in SCHEDULES.items()
    ]
    steps: dict[str, list[float]] = {group.name: [] for group in groups}
    with running(groups, print):
        for group in groups:
            group.turn(1)  # builds the schedule
        for _, group in interleaved(groups, rounds):
            steps[group.name] += _bubbles(group.turn(1))
        for group in groups:
            if group.error:
                raise RuntimeError(f"{group.name}: {group.error}")
    return {
        name: {"computed": computed(SCHEDULES[name]), "measured": median(found)}
        for name, found in steps.items()
    }


def _bubbles(answers: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Of each step. The step takes as long as on the slowest rank."""
    found = []
    for of_step in zip(*answers, strict=True):
        wall = max(wall for _, wall in of_step)
        found.append(1 - sum(slept for slept, _ in of_step) / (wall * len(of_step)))
    return found


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.1, help="seconds of a forward on one rank")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    machine = describe()
    found = measure(given.rounds, given.sleep)
    for name, row in found.items():
        off = row["measured"] / row["computed"] - 1
        verdict = "met" if abs(off) <= TARGET else "MISSED"
        numbers = f"computed {row['computed']:.4f}  measured {row['measured']:.4f}"
        print(f"{name:<16} {numbers}  {off:+.1%}  {verdict}")
    if given.out:
        text = {"machine": machine, "sleep_s": given.sleep, "rounds": given.rounds, "bubble": found}
        given.out.write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
