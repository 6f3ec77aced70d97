"""Measures training steps: CPU time by phase, wall time, loss, gradient norm, memory and bytes moved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from comparability import Row, mark_comparable, statistics
from interleaving import Clock, Job, Say, WorkerGroup, interleaved, running
from models import GPTTask, StackTask
from systems import System, Trainer

PHASES = ("forward", "backward", "step")
MEASURES = ("cpu", "wall", "compute", *PHASES, "step_wall")
"""The measures of every step, in seconds: total CPU time, wall time, CPU time of forward + backward, CPU
time of each phase, wall time of the last phase."""


@dataclass(frozen=True)
class RunLength:
    """How long every system is measured: ``warm_up`` steps, then ``rounds`` turns of ``burst`` steps."""

    warm_up: int
    rounds: int
    burst: int


@dataclass(frozen=True)
class Line:
    """A system in a comparison. Lines may differ in ``ranks``. ``threads`` is per rank."""

    system: System
    ranks: int = 2
    name: str = ""
    threads: int = 1

    @property
    def title(self) -> str:
        """Its name in the table."""
        return self.name or self.system.name


@dataclass(frozen=True)
class TrainingJob:
    """Train a task with a system. The system is looked up by name, because builders cannot be pickled."""

    protocol: str
    line: str
    task: GPTTask | StackTask
    micro_batches: int

    def prepare(self) -> None:
        """Nothing: the measured memory includes what the system opens."""

    def open(self, rank: int) -> TrainingSession:
        """Build the system on this rank."""
        from protocols import find_line

        trainer = find_line(self.protocol, self.line).system.build(
            self.task.model(), self.micro_batches
        )
        return TrainingSession(trainer, self.task.data(rank, 8), self.micro_batches)


@dataclass
class TrainingSession:
    """``turn(n)`` trains n steps."""

    trainer: Trainer
    data: list[Any]
    micro_batches: int
    done: int = field(default=0)

    def turn(self, request: int) -> list[dict[str, float]]:
        """The record of every step."""
        return [self._step() for _ in range(request)]

    def close(self) -> None:
        """Close the system."""
        self.trainer.close()

    def _step(self) -> dict[str, float]:
        """CPU seconds of this process in each part of the step, wall seconds, loss, and the norm if
        known."""
        clock, cpu = Clock(), dict.fromkeys((*PHASES, "step_wall"), 0.0)
        losses, trainer = [], self.trainer
        before = trainer.moved()
        for number in range(self.micro_batches):
            last = number + 1 == self.micro_batches
            x, y = self.data[self.done % len(self.data)]
            self.done += 1
            begin = clock.read()[0]
            trainer.before(last)
            loss = trainer.forward(x, y)
            after_forward = clock.read()[0]
            trainer.backward(loss)
            after_backward, step_begin = clock.read()
            if last or trainer.counts:
                trainer.step()
            end, step_end = clock.read()
            cpu["forward"] += after_forward - begin
            cpu["backward"] += after_backward - after_forward
            cpu["step"] += end - after_backward
            cpu["step_wall"] += step_end - step_begin
            losses.append(loss.detach())
        wall = clock.read()[1]
        norm = trainer.norm()
        known = {} if norm is None else {"norm": norm}
        known |= {key: float(now - before[key]) for key, now in trainer.moved().items()}
        return {**cpu, "wall": wall, "loss": sum(map(float, losses)) / len(losses), **known}


def compare(
    protocol: str,
    lines: Sequence[Line],
    task: GPTTask | StackTask,
    length: RunLength,
    say: Say,
    *,
    micro_batches: int = 1,
    job: Callable[[Line], Job] | None = None,
) -> list[Row]:
    """One row per line: statistics of its steps, and whether it trains as the others do.

    ``job`` makes the job of a line. The default looks lines up with :func:`protocols.find_line`.
    """

    def found(line: Line) -> Job:
        return TrainingJob(protocol, line.title, task, micro_batches) if job is None else job(line)

    groups = {
        line.title: WorkerGroup(line.title, found(line), line.ranks, line.threads)
        for line in lines
        if not line.system.absent
    }
    steps: dict[str, list[dict[str, float]]] = {title: [] for title in groups}
    with running(list(groups.values()), say):
        for group in groups.values():
            if not group.error:
                say(f"warming up {group.name}")
                with group.sampling_memory("training"):
                    steps[group.name] += _mean_over_ranks(group.turn(length.warm_up))
        for number, group in interleaved(list(groups.values()), length.rounds):
            say(f"round {number + 1} of {length.rounds}: {group.name}")
            steps[group.name] += _mean_over_ranks(group.turn(length.burst))
    rows = [_row(line, groups.get(line.title), steps, length.warm_up) for line in lines]
    mark_comparable(rows)
    return rows


def _mean_over_ranks(answers: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """CPU time, loss and norm are the mean over ranks. Wall time is that of the slowest rank."""
    steps = []
    for records in zip(*answers, strict=True):
        step = {key: sum(r[key] for r in records) / len(records) for key in records[0]}
        for key in ("wall", "step_wall"):
            step[key] = max(record[key] for record in records)
        step["compute"] = step["forward"] + step["backward"]
        step["cpu"] = step["compute"] + step["step"]
        steps.append(step)
    return steps


def _row(
    line: Line, group: WorkerGroup | None, steps: dict[str, list[dict[str, float]]], warm_up: int
) -> Row:
    system = line.system
    row: Row = {
        "name": line.title,
        "family": system.family,
        "stage": system.stage,
        "transport": system.transport,
        "ranks": line.ranks,
        "version": system.version,
        "setting": system.setting,
    }
    if group is None:
        return {**row, "absent": system.absent}
    if group.error:
        return {**row, "error": group.error}
    mine = steps[line.title]
    timed = mine[warm_up:]
    row |= {f"{key}_ms": statistics([1000 * s[key] for s in timed]) for key in MEASURES}
    if moved := [key for key in timed[0] if key.endswith("_nbytes")]:
        row["moved_nbytes"] = {key: round(median(step[key] for step in timed)) for key in moved}
    row["steps"] = len(timed)
    row["losses"] = [step["loss"] for step in mine]
    if all("norm" in step for step in mine):
        row["norms"] = [step["norm"] for step in mine]
    row["peak_mib"] = {key: round(n / 2**20, 1) for key, n in group.peak_nbytes.items()}
    row["compared"] = system.compared
    return row
