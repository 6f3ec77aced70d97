"""Decides from the ends of all ranks whether a test's body passed, and which rank failed first if not."""

from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroshard_testing.worker import TestJob, TestReport

GRACE_S = 1.0
"""Seconds that the peers of a failed rank have to report as well."""

_LIFELINE_STACK = re.compile(
    r"^Thread .*\n(  File .*\n)*.* in _end_with_parent\n(  File .*\n)*\n?", re.M
)
"""The stack of the kit's own thread, which is left out of the stacks of a blocked rank."""


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank that sent no report.

    ``exitcode`` as in ``multiprocessing``: negative for a signal. ``output`` is what the rank printed.
    """

    exitcode: int
    output: str = field(default="", compare=False)

    def __str__(self) -> str:
        if self.exitcode < 0:
            how = "stopped" if self.stopped else "killed"
            return f"{how} by {signal.Signals(-self.exitcode).name}"
        return f"exit code {self.exitcode}"

    @property
    def stopped(self) -> bool:
        """Whether it was frozen and not dead."""
        return self.exitcode == -signal.SIGSTOP

    def is_as_expected(self, expected: int | None) -> bool:
        """Whether it is the ``expected`` end: a ``signal.Signals``, an exit code, or None for any."""
        if isinstance(expected, signal.Signals):
            return self.exitcode == -expected
        return expected is None or self.exitcode == expected


class Outcome:
    """The result of a run on several ranks, from the ends of all of them."""

    def __init__(
        self,
        jobs: Sequence[TestJob],
        ends: Mapping[int, TestReport | RankEnd],
        expect_death: Mapping[int, int | None],
        *,
        keep_exceptions: bool,
    ) -> None:
        self._jobs = jobs
        self._ends = {
            r: RankEnd(end.exitcode, self._output(r)) if isinstance(end, RankEnd) else end
            for r, end in ends.items()
        }
        self._expect_death = expect_death
        self.blocked = [r for r in range(len(jobs)) if r not in ends]
        self._wrong = [
            r
            for r, end in self._ends.items()
            if (
                not (r in expect_death and end.is_as_expected(expect_death[r]))
                if isinstance(end, RankEnd)
                else r in expect_death or (end.kind == "error" and not keep_exceptions)
            )
        ]
        self.failed = bool(self.blocked or self._wrong)

    @property
    def all_returned(self) -> bool:
        return all(isinstance(e, TestReport) and e.kind == "result" for e in self._ends.values())

    @property
    def skipped(self) -> str | None:
        """The reason if a rank asked to skip the test, else None."""
        for end in self._ends.values():
            if isinstance(end, TestReport) and end.kind == "skip":
                return str(pickle.loads(end.payload))
        return None

    @property
    def results(self) -> list[Any]:
        ends = [self._ends[r] for r in range(len(self._jobs))]
        return [end if isinstance(end, RankEnd) else pickle.loads(end.payload) for end in ends]

    def text(self, *, timeout_s: float, ask_for_stacks: Callable[[int], None]) -> str:
        """The failures, most important first: deaths, then exceptions by time, then ranks still blocked.

        ``ask_for_stacks(rank)`` makes a blocked rank write its stacks to its output.
        """
        world = len(self._jobs)
        parts = []
        for r in sorted(self._wrong, key=self._when):
            end = self._ends[r]
            if isinstance(end, TestReport) and end.kind == "result":
                parts.append(f"rank {r} of {world} returned; its death was expected")
            elif isinstance(end, TestReport) and not parts:
                parts.append(f"rank {r} of {world} failed:\n{end.text.rstrip()}")
            elif isinstance(end, TestReport):
                parts.append(f"rank {r} also failed: {end.text.rstrip().splitlines()[-1]}")
            else:
                parts.append(f"rank {r} of {world} died: {end}")
        after = f"after {GRACE_S:g} s of grace" if parts else f"after {timeout_s:g} s"
        if self.blocked:
            parts.append(f"still blocked: ranks {self.blocked} {after}")
            for r in self.blocked if len(parts) == 1 else ():  # no rank failed: where do they hang?
                ask_for_stacks(r)
        for r in range(world):
            output = self._output(r).rstrip()
            if output:
                parts.append(f"--- output of rank {r} ---\n{output}")
        return "\n".join(parts)

    def show_outputs(self) -> None:
        """Print what ranks printed, so that the test runner captures it."""
        for r in range(len(self._jobs)):
            for line in self._output(r).splitlines():
                print(f"[rank {r}] {line}")

    def _when(self, rank: int) -> float:
        end = self._ends[rank]
        return end.at_s if isinstance(end, TestReport) else 0.0

    def _output(self, rank: int) -> str:
        path = self._jobs[rank].output
        text = path.read_text(errors="replace") if path.exists() else ""
        text = _LIFELINE_STACK.sub("", text)
        return text if len(text) < 20_000 else f"[...]\n{text[-20_000:]}"
