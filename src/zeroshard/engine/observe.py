"""Reports on a run while it trains: lines, monitors and breakdowns.

Nothing here waits for a device, except to print a number that was asked for. Times are the host's
(``time.perf_counter``), traffic is from the recorder, and bytes are from the ledger.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from zeroshard.comm.recorder import Recorder
from zeroshard.config import Config
from zeroshard.core.ledger import RESTING, TEMPORARY, Ledger
from zeroshard.engine.monitors import Monitors, train_events
from zeroshard.engine.report import StepReport

logger = logging.getLogger("zeroshard")
T = TypeVar("T")

BREAKDOWN_EVERY = 10
"""Steps between breakdowns if ``steps_per_print`` is not set."""


class Observer:
    """Reports finished steps: a line and breakdowns on rank 0, events to the monitors.

    Keys: ``steps_per_print``; ``wall_clock_breakdown``: time inside forward, backward and step;
    ``memory_breakdown``: bytes held at the end of each; ``comms_logger``: collectives since the last line
    (``verbose``: per unit, ``prof_ops``: only these); and the monitor sections.

    ``disk()`` returns an object whose text describes what this rank's disk did in the last update; None
    if no optimizer state is on disk. The main rank logs it after the step's line.
    """

    def __init__(
        self,
        settings: Config,
        *,
        recorders: Sequence[Recorder],
        ledger: Ledger,
        monitors: Monitors | None,
        is_main_rank: bool,
        disk: Callable[[], object | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._disk, self._last_disk = disk, disk()
        self._recorders, self._ledger = recorders, ledger
        self.monitors = monitors
        self._is_main_rank = is_main_rank
        self._seconds: dict[str, float] = {}  # by phase, since the last line
        self._last_s: dict[str, float] = {}  # by phase, in the current step, for the monitors
        self._held: dict[str, dict[str, int]] = {}
        self._sent: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._steps = 0
        breaks_down = settings.wall_clock_breakdown or settings.memory_breakdown
        self.watches_phases = breaks_down
        self._breakdown_every = self._every(settings.steps_per_print) or (
            BREAKDOWN_EVERY if breaks_down or settings.comms_logger.enabled else 0
        )
        self._line_every = self._every(settings.steps_per_print)

    @staticmethod
    def _every(steps: float | None) -> int:
        """The interval as an integer, 0 for never. Accelerate passes infinity for never."""
        return max(1, int(steps)) if steps and math.isfinite(steps) else 0

    def phase(self, name: str, call: Callable[..., T]) -> Callable[..., T]:
        """``call``, with its time and the bytes held at its end recorded."""

        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> T:
            begin_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._note(name, time.perf_counter() - begin_s)

        return observed

    def _note(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._last_s[name] = self._last_s.get(name, 0.0) + seconds
        self._held[name] = {c: self._ledger.nbytes(c) for c in (*RESTING, *TEMPORARY)}

    def after_step(self, report: StepReport, *, samples: int, skipped: int) -> None:
        """An optimizer step has ended. ``samples`` and ``skipped`` count from the start of the run."""
        self._steps += 1
        if self.monitors:
            self.monitors.write(
                train_events(samples, lr=report.lr, loss_scale=report.loss_scale)
                + [
                    (f"Train/Samples/elapsed_time_ms_{name}", 1e3 * seconds, samples)
                    for name, seconds in self._last_s.items()
                    if self._settings.wall_clock_breakdown
                ]
            )
        self._last_s = {}
        before, self._last_disk = self._last_disk, self._disk()
        if self._is_main_rank and self._line_every and report.step % self._line_every == 0:
            logger.info("%s", step_line(report, skipped))
            if self._last_disk is not before:  # a skipped step does not use the disk
                logger.info("%s", self._last_disk)
        if self._breakdown_every and report.step % self._breakdown_every == 0:
            lines = self.lines()
            for line in lines if self._is_main_rank else ():
                logger.info("%s", line)

    def lines(self) -> list[str]:
        """The breakdowns that the configuration enables, over the steps since the last call."""
        found = []
        if self._settings.wall_clock_breakdown:
            found.append(self._time_line())
        if self._settings.memory_breakdown:
            found += [memory_line(name, held) for name, held in self._held.items()]
        if self._settings.comms_logger.enabled:
            found += self._traffic_lines()
        self._seconds, self._steps = {}, 0
        return found

    def _time_line(self) -> str:
        steps = max(1, self._steps)
        parts = [f"{name} {1e3 * total / steps:.2f}" for name, total in self._seconds.items()]
        return f"host ms per step: {', '.join(parts)}"

    def _traffic_lines(self) -> list[str]:
        section = self._settings.comms_logger
        totals: dict[str, tuple[int, int]] = {}
        entries = [(each.group, entry) for each in self._recorders for entry in each.traffic()]
        for group, entry in entries:
            op = entry.op.partition(" ")[0]  # "broadcast from 0"
            calls, sent = self._sent.get((group, entry.op, entry.name), (0, 0))
            self._sent[group, entry.op, entry.name] = (entry.calls, entry.sent_numel)
            if not section.prof_all and op not in section.prof_ops:
                continue
            for label in (op, f"{op} {entry.name}") if section.verbose else (op,):
                before = totals.get(label, (0, 0))
                totals[label] = (
                    before[0] + entry.calls - calls, before[1] + entry.sent_numel - sent
                )  # fmt: skip
        steps = max(1, self._steps)
        return [
            f"collectives per step: {label} {calls / steps:g} calls, "
            f"{sent / steps / 1e6:.3f} M elements sent"
            for label, (calls, sent) in sorted(totals.items())
            if calls
        ]

    def close(self) -> None:
        """Close the monitors."""
        if self.monitors is not None:
            self.monitors.close()


def step_line(report: StepReport, skipped: int) -> str:
    """One line about a step. Waits for the device."""
    norm, clipped = report.grad_norm, report.grad_norm_clipped
    text = "none" if norm is None or clipped is None else f"{norm:.4g}"
    if norm is not None and clipped is not None and clipped < norm:
        text += f" -> clipped {clipped:.4g}"
    lrs = ", ".join(f"{lr:.3g}" for lr in report.lrs)
    return (
        f"step={report.step} skipped={skipped} lr=[{lrs}] grad_norm={text} "
        f"loss_scale={report.loss_scale:g}"
    )


def memory_line(phase: str, held: dict[str, int]) -> str:
    """A line with the bytes held after a phase.

    >>> memory_line("forward", {"parameters": 2**20, "gradients": 0})
    'MiB held after forward: parameters 1.00'
    """
    parts = [f"{name} {nbytes / 2**20:.2f}" for name, nbytes in held.items() if nbytes]
    return f"MiB held after {phase}: {', '.join(parts) or 'nothing'}"
