"""Starts a failed run again, from its newest checkpoint.

An *attempt* is one run of all ranks, with an agent and a store of its own: nothing of a dead attempt is
reused. :func:`decide` is pure. It is told how the attempts ended and which checkpoint was the newest, and
says whether there is another one. :func:`run_attempts` carries that out.

The launcher cannot look into a program. It reads progress from the file ``latest`` in the directory of
the checkpoints, which every complete save replaces.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from zeroshard.run.exit_report import ExitReport

MAX_WITHOUT_PROGRESS = 3
"""So many attempts in a row that save no newer checkpoint end the run."""
FIRST_WAIT_S, LONGEST_WAIT_S = 5.0, 300.0


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """A checkpoint, and when its file ``latest`` was written: a tag may be saved again."""

    tag: str
    saved_at_ns: int


@dataclass(frozen=True, slots=True)
class EndedAttempt:
    """How one attempt ended. ``before`` and ``after``: the newest checkpoint at its start and its end."""

    report: ExitReport
    before: NewestCheckpoint | None
    after: NewestCheckpoint | None
    seconds: float = 0.0

    @property
    def has_progress(self) -> bool:
        return self.after is not None and self.after != self.before

    @property
    def cause(self) -> str:
        return self.report.lines[0].rstrip(".") if self.report.lines else "no reason is known"

    @property
    def exception(self) -> str:
        """The cause, if it is an exception of the program; empty for a signal or an exit code."""
        return self.cause if self.report.trace else ""


@dataclass(frozen=True, slots=True)
class Decision:
    """``restart`` after ``wait_s`` seconds, or end. ``reason``: why a failure is not followed."""

    restart: bool
    wait_s: float = 0.0
    reason: str = ""


_PLACES = ("latest", "checkpoint*/latest", "checkpoint*/pytorch_model*/latest")
"""Where saves write ``latest``: an engine, Transformers' Trainer, and Accelerate."""


def read_newest(directory: Path) -> NewestCheckpoint | None:
    """The checkpoint in ``directory`` that was saved last; None before the first save.

    Its tag is what ``latest`` names, or the folder in which a Trainer or an Accelerator has put it.
    """
    found = []
    for path in (path for pattern in _PLACES for path in directory.glob(pattern)):
        folders = path.relative_to(directory).parts[:-1]
        with contextlib.suppress(OSError):  # a Trainer has removed it
            tag = folders[0] if folders else path.read_text(errors="replace").strip()
            found.append(NewestCheckpoint(tag, path.stat().st_mtime_ns))
    return max(found, key=lambda newest: newest.saved_at_ns, default=None)


def decide(attempts: Sequence[EndedAttempt], max_restarts: int) -> Decision:
    """Whether the run starts again after ``attempts``, of which there is at least one.

    It ends after a success, a signal of the user, ``max_restarts`` restarts, or
    :data:`MAX_WITHOUT_PROGRESS` attempts in a row without a newer checkpoint, or with the same exception
    and the same newest checkpoint. The wait doubles with each attempt without a newer checkpoint, from
    :data:`FIRST_WAIT_S` to :data:`LONGEST_WAIT_S`.
    """
    last = attempts[-1]
    if last.report.exitcode == 0 or last.report.interrupted:
        return Decision(False)
    recent = attempts[-MAX_WITHOUT_PROGRESS:]
    is_full = len(recent) == MAX_WITHOUT_PROGRESS
    place = f"the newest checkpoint is {last.after.tag!r}" if last.after else "none was saved"
    if is_full and last.exception and len({(a.exception, a.after) for a in recent}) == 1:
        return Decision(
            False,
            reason=f"{len(recent)} attempts in a row ended with the same exception at the same place "
            f"({place}): {last.exception}. This is an error of the program or its data, and another "
            "attempt would end in the same way.",
        )
    idle = 0
    for attempt in reversed(attempts):
        if attempt.has_progress:
            break
        idle += 1
    if idle >= MAX_WITHOUT_PROGRESS:
        return Decision(
            False,
            reason=f"{idle} attempts in a row saved no newer checkpoint ({place}). If the program saves "
            "too rarely to get there, save more often; if it saves elsewhere, correct --checkpoint-dir.",
        )
    if len(attempts) > max_restarts:
        return Decision(False, reason=f"--max-restarts {max_restarts} is used up.")
    return Decision(True, wait_s=min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** max(0, idle - 1)))


def run_attempts(
    run: Callable[[int], ExitReport],
    newest: Callable[[], NewestCheckpoint | None],
    max_restarts: int,
    console: TextIO,
    *,
    prepare: Callable[[], str] = lambda: "",
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run attempts 0, 1, ... until :func:`decide` ends the run; returns the exit code of the last one.

    ``run`` runs one attempt to its end and prints its report. ``prepare`` chooses the ranks of the next
    attempt, after the wait; it returns "", or why there is none.
    """
    attempts: list[EndedAttempt] = []
    while True:
        before, began_s = newest(), clock()
        report = run(len(attempts))
        attempts.append(EndedAttempt(report, before, newest(), clock() - began_s))
        decision = decide(attempts, max_restarts)
        if not decision.restart:
            break
        say(
            console,
            f"attempt {len(attempts) - 1} ended; restart {len(attempts)} of {max_restarts} in "
            f"{decision.wait_s:g} s, {_from(attempts[-1].after)}.",
        )
        try:
            sleep(decision.wait_s)
            reason = prepare()
        except KeyboardInterrupt:
            say(console, "stopped by SIGINT between two attempts.")
            return 130
        if reason:
            decision = Decision(False, reason=reason)
            break
    if decision.reason:
        say(console, f"not restarted: {decision.reason}")
    if len(attempts) > 1:
        for number, attempt in enumerate(attempts):
            end = attempt.cause if attempt.report.exitcode else "finished"
            say(console, f"attempt {number}: {attempt.seconds:.0f} s, {end}.")
    return attempts[-1].report.exitcode


def _from(newest: NewestCheckpoint | None) -> str:
    return f"from checkpoint {newest.tag!r}" if newest else "from the beginning: no checkpoint yet"


def say(console: TextIO, text: str) -> None:
    """Print a line of the launcher."""
    print(f"zeroshard: {text}", file=console, flush=True)
