"""Reports on a run while it trains: lines, events of monitors, and the record in the run's folder.

Nothing here waits for a device, except to print a number that was asked for. Traffic is from the
recorder, and bytes are from the ledger.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple, TypeVar

from zeroshard.comm.recorder import Entry, Recorder
from zeroshard.config import Config
from zeroshard.core.ledger import RESTING, TEMPORARY, Ledger
from zeroshard.metrics.monitors import BLOCKED_S, Monitors
from zeroshard.metrics.run_log import RunLog
from zeroshard.metrics.step_report import StepReport
from zeroshard.metrics.step_stream import MEMORY_EVERY, StepEvent, StepStream

logger = logging.getLogger("zeroshard")
T = TypeVar("T")

BREAKDOWN_EVERY = 10
"""Steps between breakdowns if ``steps_per_print`` is not set."""


class CollectiveCost(NamedTuple):
    """What one kind of collective has cost so far.

    ``flight_s`` and ``flight_nbytes`` are of the calls whose wait blocked the host: seconds from the
    start to the arrival, and bytes that this rank sent in them.
    """

    calls: int = 0
    sent_nbytes: int = 0
    waited_s: float = 0.0
    flight_s: float = 0.0
    flight_nbytes: int = 0

    @classmethod
    def of(cls, entry: Entry) -> CollectiveCost:
        """The traffic of an entry of the recorder."""
        return cls(*(getattr(entry, name) for name in cls._fields))

    def plus(self, other: CollectiveCost, sign: int = 1) -> CollectiveCost:
        """The sum; with ``sign=-1`` the difference."""
        return CollectiveCost._make(a + sign * b for a, b in zip(self, other, strict=True))

    def line(self, label: str, steps: int) -> str:
        """Calls, bytes sent and time waited of one step, and the bandwidth of the bus.

        The bandwidth is what one rank sends in a second, as NCCL's tests define it.

        >>> CollectiveCost(4, 6_000_000, 0.004, 0.003, 3_000_000).line("all_gather", 2)
        'collectives per step: all_gather 2 calls, 3.000 MB sent, 2.00 ms waited, bus 1 GB/s'
        """
        text = (
            f"collectives per step: {label} {self.calls / steps:g} calls, "
            f"{self.sent_nbytes / steps / 1e6:.3f} MB sent"
        )
        if self.waited_s:
            text += f", {1e3 * self.waited_s / steps:.2f} ms waited"
        if self.flight_nbytes:
            text += f", bus {self.flight_nbytes / self.flight_s / 1e9:.3g} GB/s"
        return text


class Observer:
    """Reports finished steps: a line and breakdowns on rank 0, events to the monitors, a record.

    Keys: ``steps_per_print``; ``wall_clock_breakdown``: time inside forward, backward and step;
    ``memory_breakdown``: bytes held at the end of each; ``comms_logger``: collectives since the last line
    (``verbose``: per unit, ``prof_ops``: only these); the monitor sections; ``trust.report``.

    ``make_stream`` makes the events of steps; None on ranks that send none. ``disk()`` returns an object
    whose text describes what this rank's disk did in the last update. The main rank logs it after the
    step's line. None: no state is on disk.
    """

    def __init__(
        self,
        settings: Config,
        *,
        recorders: Sequence[Recorder],
        ledger: Ledger,
        monitors: Monitors,
        run_log: RunLog | None = None,
        make_stream: Callable[[Callable[[StepEvent], None]], StepStream] | None = None,
        is_main_rank: bool,
        disk: Callable[[], object | None] | None = None,
    ) -> None:
        self._settings = settings
        self._disk, self._last_disk = disk, None if disk is None else disk()
        self._recorders, self._ledger = recorders, ledger
        self.monitors = monitors
        self._run_log = run_log
        self.stream = make_stream(self._emit) if make_stream is not None else None
        self._is_main_rank = is_main_rank
        self._seconds: dict[str, float] = {}  # of the host by phase, since the last line
        self._marks: list[Any] = []  # (phase, begin, end) in the current step
        self._held: dict[str, dict[str, int]] = {}
        self._sent: dict[tuple[str, str, str], CollectiveCost] = {}
        self._steps = 0
        self._in_step = False
        self._ended: tuple[StepReport, int, int, float] | None = None  # its last phase still runs
        self._breaks_down = settings.wall_clock_breakdown or settings.memory_breakdown
        self._breakdown_every = self._every(settings.steps_per_print) or (
            BREAKDOWN_EVERY if self._breaks_down or settings.comms_logger.enabled else 0
        )
        self._line_every = self._every(settings.steps_per_print)

    @staticmethod
    def _every(steps: float | None) -> int:
        """The interval as an integer, 0 for never. Accelerate passes infinity for never."""
        return max(1, int(steps)) if steps and math.isfinite(steps) else 0

    # ------------------------------------------------------------------ phases

    def phase(self, name: str, call: Callable[..., T]) -> Callable[..., T]:
        """``call``, with its time and the bytes held at its end recorded."""
        is_step, timed = name == "step", self._settings.wall_clock_breakdown
        mark = self.stream.ops.mark if self.stream is not None and timed else None

        @functools.wraps(call)
        def observed(*args: Any, **kwargs: Any) -> T:
            begin_s = time.perf_counter()
            begin = mark() if mark is not None else None
            self._in_step = is_step
            try:
                return call(*args, **kwargs)
            finally:
                if mark is not None:
                    self._marks.append((name, begin, mark()))
                seconds = time.perf_counter() - begin_s
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds
                self._held[name] = {c: self._ledger.nbytes(c) for c in (*RESTING, *TEMPORARY)}
                self._in_step = False
                self._finish_step()

        return observed

    def watch_calls(self, engine: Any) -> None:
        """Watch the calls of an engine: tokens of forwards, memory, and times of phases if asked to."""
        engine.backward = _notes_memory(engine.backward, weakref.ref(engine))
        if self._run_log is not None:
            self._run_log.facts = partial(_facts, weakref.ref(engine))
        if self.stream is not None:
            engine.forward = _counts_tokens(engine.forward, self.stream)
        if self._breaks_down:
            for phase in ("forward", "backward", "step"):
                setattr(engine, phase, self.phase(phase, getattr(engine, phase)))

    @property
    def flops_counted(self) -> Callable[..., float] | None:
        """What gets the measured operations of a forward; None on ranks that send no events."""
        return None if self.stream is None else self.stream.flops_counted

    # ------------------------------------------------------------------ steps

    def after_step(self, report: StepReport, samples: int, skipped: int, next_lr: float) -> None:
        """An optimizer step has ended. ``samples`` and ``skipped`` count from the start of the run.

        ``next_lr``: the learning rate after the step.
        """
        self._ended = report, samples, skipped, next_lr
        if not self._in_step:
            self._finish_step()

    def _finish_step(self) -> None:
        """Report the step that has ended, if its last phase has ended as well."""
        if self._ended is None:
            return
        (report, samples, skipped, next_lr), self._ended = self._ended, None
        marks, self._marks = self._marks, []
        self._steps += 1
        # Monitors may be added later, so they are asked in every step.
        if self.stream is not None and (self._run_log is not None or self.monitors):
            step = self.stream.end_step(report, samples, next_lr)
            if step is not None:
                step.phases = marks
                self.stream.send(step)
        before = self._last_disk
        if self._disk is not None:
            self._last_disk = self._disk()
        if self._is_main_rank and self._line_every and report.step % self._line_every == 0:
            logger.info("%s", step_line(report, skipped))
            if self._last_disk is not before:  # a skipped step does not use the disk
                logger.info("%s", self._last_disk)
        if self._breakdown_every and report.step % self._breakdown_every == 0:
            lines = self.lines()
            for line in lines if self._is_main_rank else ():
                logger.info("%s", line)

    def _emit(self, event: StepEvent) -> None:
        if self.monitors:
            self.monitors.write(event.events)
        if self._run_log is not None:
            self._run_log.note_step(event)

    # ------------------------------------------------------------------ lines

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
        totals: dict[str, CollectiveCost] = {}
        entries = [(each.group, entry) for each in self._recorders for entry in each.traffic()]
        for group, entry in entries:
            op = entry.op.partition(" ")[0]  # "broadcast from 0"
            key = group, entry.op, entry.name
            now = CollectiveCost.of(entry)
            change = now.plus(self._sent.get(key, CollectiveCost()), -1)
            self._sent[key] = now
            if not section.prof_all and op not in section.prof_ops:
                continue
            for label in (op, f"{op} {entry.name}") if section.verbose else (op,):
                totals[label] = totals.get(label, CollectiveCost()).plus(change)
        steps = max(1, self._steps)
        return [
            traffic.line(label, steps) for label, traffic in sorted(totals.items()) if traffic.calls
        ]

    def flush(self) -> None:
        """Wait until the values of all steps are written, but no longer than for a sink that blocks."""
        if self.stream is not None:
            self.stream.close(wait=True)
        self.monitors.flush(BLOCKED_S)

    def end(self, reason: str = "") -> None:
        """Send what is left, while the engine still has its memory.

        ``reason``: the error that ends the run.
        """
        self._finish_step()
        if self.stream is not None:
            self.stream.close(wait=not reason)
        if self._run_log is not None:
            self._run_log.end(reason)

    def close(self) -> None:
        """Wait until everything is written, and close the monitors."""
        self.monitors.close()
        if self._run_log is not None:
            self._run_log.close()


def _counts_tokens(forward: Callable[..., T], stream: StepStream) -> Callable[..., T]:
    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> T:
        stream.count_tokens(args, kwargs)
        return forward(*args, **kwargs)

    return counted


def _notes_memory(backward: Callable[..., T], engine: weakref.ref[Any]) -> Callable[..., T]:
    """``backward``, which looks at the memory in the first steps and then in every tenth."""

    @functools.wraps(backward)
    def noting(*args: Any, **kwargs: Any) -> T:
        owner: Any = engine()
        if owner.global_steps % MEMORY_EVERY == 0 or owner.global_steps < 3:
            owner.memory_baseline.note(owner)
        return backward(*args, **kwargs)

    return noting


def _facts(engine: weakref.ref[Any]) -> dict[str, Any]:
    """Bytes planned and measured, and the traffic of this rank so far."""
    owner = engine()
    if owner is None:
        return {"memory": [], "traffic": []}
    return {
        "memory": [asdict(row) for row in owner.memory_report().rows],
        "traffic": [
            {"group": each.group, "op": entry.op, "name": entry.name,
             **CollectiveCost.of(entry)._asdict(), "payload_numel": entry.payload_numel}
            for each in owner._watch.recorders
            for entry in each.traffic()
            if entry.calls
        ],
    }  # fmt: skip


def step_line(report: StepReport, skipped: int) -> str:
    """One line about a step. Waits for the device."""
    norm, clipped = report.grad_norm, report.grad_norm_clipped
    text = "none" if norm is None or clipped is None else f"{norm:.4g}"
    if norm is not None and clipped is not None and clipped < norm:
        text += f" -> clipped {clipped:.4g}"
    lrs = ", ".join(f"{lr:.3g}" for lr in report.lrs)
    loss = "" if report.loss is None else f" loss={report.loss:.4g}"
    return (
        f"step={report.step} skipped={skipped}{loss} lr=[{lrs}] grad_norm={text} "
        f"loss_scale={report.loss_scale:g}"
    )


def memory_line(phase: str, held: dict[str, int]) -> str:
    """A line with the bytes held after a phase.

    >>> memory_line("forward", {"parameters": 2**20, "gradients": 0})
    'MiB held after forward: parameters 1.00'
    """
    parts = [f"{name} {nbytes / 2**20:.2f}" for name, nbytes in held.items() if nbytes]
    return f"MiB held after {phase}: {', '.join(parts) or 'nothing'}"
