"""How is a training step measured, and do all systems train alike?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from models import GPTTask, StackTask
from systems import System, Trainer
from teams import Clock, Say, Team, in_turns, running

NOISE = 0.005
"""Largest relative distance of a loss from the other systems' that bf16 may explain. (The same model in
fp32 and under bf16 autocast, in one process: 0.0002 over 20 steps.)"""

COMPARED_STEPS = 16
"""Two passes over the data. Later a batch this small makes the loss jump by itself, by a factor of two,
and rounding decides at which step: from there on no two libraries agree."""

PHASES = ("forward", "backward", "step")
MEASURES = ("cpu", "wall", "compute", *PHASES)
"""Of every step: CPU seconds in all, wall seconds, CPU of forward + backward, CPU of each phase."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long every system is measured: ``rounds`` turns of ``burst`` steps."""

    warm_up: int
    rounds: int
    burst: int


@dataclass(frozen=True)
class Line:
    """A system in a comparison; ``ranks`` may differ from that of the others."""

    system: System
    ranks: int = 2
    name: str = ""

    @property
    def title(self) -> str:
        """What the table calls it."""
        return self.name or self.system.name


@dataclass(frozen=True)
class TrainingJob:
    """Train a task with a system. The system is found by name: builders do not pickle."""

    protocol: str
    line: str
    task: GPTTask | StackTask
    micro_batches: int

    def prepare(self) -> None:
        """Nothing: memory includes what the system opens."""

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
        """CPU seconds of this process in each part of the step, wall seconds of the whole, the loss."""
        clock, cpu = Clock(), dict.fromkeys(PHASES, 0.0)
        losses, trainer = [], self.trainer
        for number in range(self.micro_batches):
            last = number + 1 == self.micro_batches
            x, y = self.data[self.done % len(self.data)]
            self.done += 1
            begin = clock.read()[0]
            trainer.before(last)
            loss = trainer.forward(x, y)
            after_forward = clock.read()[0]
            trainer.backward(loss)
            after_backward = clock.read()[0]
            if last or trainer.counts:
                trainer.step()
            end = clock.read()[0]
            cpu["forward"] += after_forward - begin
            cpu["backward"] += after_backward - after_forward
            cpu["step"] += end - after_backward
            losses.append(loss.detach())
        wall = clock.read()[1]
        return {**cpu, "wall": wall, "loss": sum(map(float, losses)) / len(losses)}


def compare(
    protocol: str,
    lines: Sequence[Line],
    task: GPTTask | StackTask,
    effort: Effort,
    say: Say,
    *,
    micro_batches: int = 1,
) -> list[Row]:
    """One row per line: statistics of its steps, and whether its losses are the others'."""
    teams = {
        line.title: Team(
            line.title, TrainingJob(protocol, line.title, task, micro_batches), line.ranks
        )
        for line in lines
        if not line.system.absent
    }
    steps: dict[str, list[dict[str, float]]] = {title: [] for title in teams}
    with running(list(teams.values()), say):
        for team in teams.values():
            if not team.error:
                say(f"warming up {team.name}")
                with team.watched("training"):
                    steps[team.name] += _mean_over_ranks(team.turn(effort.warm_up))
        for number, team in in_turns(list(teams.values()), effort.rounds):
            say(f"round {number + 1} of {effort.rounds}: {team.name}")
            steps[team.name] += _mean_over_ranks(team.turn(effort.burst))
    rows = [_row(line, teams.get(line.title), steps, effort.warm_up) for line in lines]
    _judge(rows)
    return rows


def _mean_over_ranks(answers: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """CPU time and loss: the mean; wall time: the slowest rank."""
    steps = []
    for records in zip(*answers, strict=True):
        step = {key: sum(r[key] for r in records) / len(records) for key in records[0]}
        step["wall"] = max(record["wall"] for record in records)
        step["compute"] = step["forward"] + step["backward"]
        step["cpu"] = step["compute"] + step["step"]
        steps.append(step)
    return steps


def statistics(values: Sequence[float]) -> dict[str, float]:
    """What is kept of measured numbers, four digits of each."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def _row(
    line: Line, team: Team | None, steps: dict[str, list[dict[str, float]]], warm_up: int
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
    if team is None:
        return {**row, "absent": system.absent}
    if team.error:
        return {**row, "error": team.error}
    mine = steps[line.title]
    timed = mine[warm_up:]
    row |= {f"{key}_ms": statistics([1000 * s[key] for s in timed]) for key in MEASURES}
    row["steps"] = len(timed)
    row["losses"] = [step["loss"] for step in mine]
    row["peak_mib"] = {key: round(n / 2**20, 1) for key, n in team.peak_nbytes.items()}
    row["compared"] = system.compared
    return row


def _judge(rows: list[Row]) -> None:
    """How far is each line from the median over libraries, one curve each?

    No library outvotes the others. Lines with another number of ranks have other data: they are
    compared among themselves.
    """
    for ranks in {row["ranks"] for row in rows}:
        trained = [r for r in rows if r.get("compared") and r["ranks"] == ranks]
        early = {row["name"]: row["losses"][:COMPARED_STEPS] for row in trained}
        curves = {row["family"].split()[0]: early[row["name"]] for row in reversed(trained)}
        centre = [median(column) for column in zip(*curves.values(), strict=True)]
        for row in trained:
            pairs = zip(early[row["name"]], centre, strict=True)
            away = max(abs(a - b) / abs(b) for a, b in pairs)
            row["loss_distance"] = float(f"{away:.2g}")
            row["comparable"] = away <= NOISE


def usable(row: Row) -> bool:
    """Was it measured, and does it train as the others do?"""
    return "cpu_ms" in row and row.get("comparable", True)
