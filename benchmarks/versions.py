"""Compares versions of this package: the same steps with the sources of each folder, in turns.

    git worktree add ../before v0.1
    python benchmarks/versions.py ../before/src src --stages 0 3 --rounds 30

Each version has its own processes. Prints for every stage the median CPU time of a step, and the
median over the rounds of its ratio to the first folder's. A folder that is given twice shows what
ratios mean nothing on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from interleaving import WorkerGroup, interleaved
from models import GPTTask, StackTask
from systems import zeroshard
from training import PHASES, TrainingSession

TASKS: dict[str, tuple[GPTTask | StackTask, int]] = {
    "a1": (GPTTask(), 2),
    "a7": (StackTask(width=64, depth=200), 1),
}
"""The task of a protocol, and its ranks."""


@dataclass(frozen=True)
class VersionJob:
    """Train the task with the package that Python's path has first."""

    folder: str
    stage: int
    task: GPTTask | StackTask
    compute: str

    def prepare(self) -> None:
        """Import the package from the folder. Nothing has imported it yet in this process."""
        sys.path.insert(0, self.folder)
        import zeroshard as package

        if not Path(str(package.__file__)).is_relative_to(self.folder):
            raise RuntimeError(f"{package.__file__} was imported instead of {self.folder}")

    def open(self, rank: int) -> TrainingSession:
        """Build the engine on this rank."""
        keys = {} if self.compute == "bf16" else {"compute": self.compute}
        trainer = zeroshard(self.stage, **keys)(self.task.model(), 1)
        return TrainingSession(trainer, self.task.data(rank, 8), 1)


def main() -> None:
    """Read the command line, measure, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="folders that contain zeroshard/")
    parser.add_argument("--task", choices=TASKS, default="a1")
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 2, 3])
    parser.add_argument("--compute", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--burst", type=int, default=5, help="steps of a turn")
    options = parser.parse_args()
    if options.rounds < 2 or options.burst < 1:
        parser.error("quartiles need two rounds or more, and a turn a step")
    folders = [str(folder.resolve()) for folder in options.folders]
    for stage in options.stages:
        rounds = _measure(folders, stage, options)
        for folder, bursts in zip(folders, rounds, strict=True):
            ratios = [
                ours["cpu"] / first["cpu"] for ours, first in zip(bursts, rounds[0], strict=True)
            ]
            low, middle, high = quantiles(ratios, n=4)
            parts = ", ".join(f"{p} {1e3 * median(b[p] for b in bursts):.2f}" for p in PHASES)
            print(
                f"stage {stage}: {1e3 * median(b['cpu'] for b in bursts):7.2f} ms ({parts}), "
                f"ratio {middle:.4f} (quartiles {low:.4f} to {high:.4f}): {folder}",
                flush=True,
            )


def _measure(folders: list[str], stage: int, options: Any) -> list[list[dict[str, float]]]:
    """For each folder and round: CPU seconds of a step and of its phases, medians of a burst."""
    task, ranks = TASKS[options.task]
    groups = [
        WorkerGroup(f"{at}", VersionJob(folder, stage, task, options.compute), ranks)
        for at, folder in enumerate(folders)
    ]
    found: list[list[dict[str, float]]] = [[] for _ in folders]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        for group in groups:
            stack.callback(group.stop)
            group.start(context, scratch)
            group.turn(5)
        for _, group in interleaved(groups, options.rounds):
            answers = group.turn(options.burst)
            if not answers:  # it has failed
                break
            found[int(group.name)].append(_burst(answers))
    failed = [f"{folders[int(group.name)]}: {group.error}" for group in groups if group.error]
    if failed:
        sys.exit("\n".join(failed))
    return found


def _burst(answers: list[list[dict[str, float]]]) -> dict[str, float]:
    steps = [step for rank in answers for step in rank]
    phases = {phase: median(step[phase] for step in steps) for phase in PHASES}
    return {**phases, "cpu": median(sum(step[phase] for phase in PHASES) for step in steps)}


if __name__ == "__main__":
    main()
