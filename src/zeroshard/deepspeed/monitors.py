"""Timers and monitors under DeepSpeed's names, for phases and events of programs.

Timers wait for the device. The engine starts none of them: its own measurements are in
``engine.last_step`` and under ``wall_clock_breakdown``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from zeroshard.comm.env import current_rank_info
from zeroshard.config.sections import MonitorSections
from zeroshard.deepspeed.logs import log_dist
from zeroshard.device.choice import current_ops
from zeroshard.metrics.monitors import Monitors, build_monitors
from zeroshard.metrics.sinks import CometSink, CsvSink, Event, TensorboardSink, WandbSink

FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER = "fwd_microstep", "fwd"
BACKWARD_MICRO_TIMER, BACKWARD_GLOBAL_TIMER = "bwd_microstep", "bwd"
BACKWARD_INNER_MICRO_TIMER, BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner_microstep", "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER = (
    "bwd_allreduce_microstep",
    "bwd_allreduce",
)
STEP_MICRO_TIMER, STEP_GLOBAL_TIMER = "step_microstep", "step"
BATCH_INPUT_TIMER, TRAIN_BATCH_TIMER = "batch_input", "train_batch"
PIPE_SEND_OUTPUT_TIMER, PIPE_RECV_INPUT_TIMER = "pipe_send_output", "pipe_recv_input"
PIPE_SEND_GRAD_TIMER, PIPE_RECV_GRAD_TIMER = "pipe_send_grad", "pipe_recv_grad"


class _Timer:
    """Time between ``start`` and ``stop``, summed until ``reset``. Results are in milliseconds."""

    def __init__(self, name: str) -> None:
        self.name_ = name
        self.started_ = False
        self._began_s = 0.0
        self._sum_s = 0.0
        self._records: list[float] = []

    def start(self) -> None:
        """Start measuring.

        Raises:
            RuntimeError: the timer is running.
        """
        if self.started_:
            raise RuntimeError(f"timer {self.name_!r} is already started")
        self._began_s = _now()
        self.started_ = True

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop measuring. ``reset``: drop earlier times. ``record``: keep this time for ``mean``.

        Raises:
            RuntimeError: the timer is not running.
        """
        if not self.started_:
            raise RuntimeError(f"timer {self.name_!r} was not started")
        passed_s = _now() - self._began_s
        self._sum_s = passed_s if reset else self._sum_s + passed_s
        if record:
            self._records.append(passed_s * 1000)
        self.started_ = False

    def reset(self) -> None:
        """Stop, and drop all times."""
        self.started_, self._sum_s, self._records = False, 0.0, []

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds so far."""
        running = self.started_
        if running:
            self.stop()
        found = self._sum_s * 1000
        if reset:
            self.reset()
        if running:
            self.start()
        return found

    def mean(self) -> float:
        """Mean of the recorded values, in milliseconds."""
        return sum(self._records) / max(1, len(self._records))


def _now() -> float:
    current_ops().synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Timers by name."""

    Timer = _Timer

    def __init__(self) -> None:
        self.timers: dict[str, _Timer] = {}

    def __call__(self, name: str) -> _Timer:
        return self.timers.setdefault(name, _Timer(name))

    def get_timers(self) -> dict[str, _Timer]:
        """All timers by name."""
        return self.timers

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log one line with the milliseconds of each timer."""
        parts = [
            f"{name}: {self.timers[name].elapsed(reset) / normalizer:.2f}"
            for name in names
            if name in self.timers
        ]
        log_dist(f"time (ms) | {' | '.join(parts)}", ranks or [0], logging.INFO)

    def get_mean(
        self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """Mean of the recorded milliseconds of each timer."""
        known = [name for name in names if name in self.timers]
        means = {name: self.timers[name].mean() / normalizer for name in known}
        if reset:
            for name in known:
                self.timers[name].reset()
        return means


class NoopTimer(SynchronizedWallClockTimer):
    """A timer that measures, too: it has no cost until it is started."""


class ThroughputTimer:
    """Samples per second between ``start`` and ``stop``, without the first ``start_step`` steps."""

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Any = None,
    ) -> None:
        self.batch_size, self.start_step = max(1, batch_size or 1), start_step
        self.epoch_count = self.global_step_count = 0
        self._began_s = self._sum_s = 0.0

    def update_epoch_count(self) -> None:
        """One more epoch."""
        self.epoch_count += 1

    def start(self) -> None:
        """A step begins."""
        self._began_s = _now()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """The step ends. It is counted only with ``global_step``."""
        passed_s = _now() - self._began_s
        self.global_step_count += global_step
        if self.global_step_count > self.start_step:
            self._sum_s += passed_s

    def avg_samples_per_sec(self) -> float:
        """Mean over all counted steps; minus infinity if there are none."""
        counted = self.global_step_count - self.start_step
        return self.batch_size * counted / self._sum_s if counted > 0 else float("-inf")


# ---------------------------------------------------------------------- monitors


class DeepSpeedMonitorConfig(MonitorSections):
    """The sections of a configuration that are about monitors."""

    @property
    def enabled(self) -> bool:
        """Whether one of the monitors is enabled."""
        return any(getattr(self, name).enabled for name in type(self).model_fields)


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """The sections of a full configuration that are about monitors.

    Raises:
        ValueError: a value does not fit.
    """
    names = DeepSpeedMonitorConfig.model_fields.keys() & param_dict.keys()
    return DeepSpeedMonitorConfig(**{name: param_dict[name] for name in names})


class Monitor:
    """Writes events on rank 0, if its section is enabled.

    Raises:
        ConfigError: the package that it needs is missing.
    """

    sink: ClassVar[Any]

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        self.enabled: bool = monitor_config.enabled
        self._monitors = self._build()

    def _build(self) -> Monitors:
        writes = self.enabled and current_rank_info().is_main_rank
        return Monitors([self.sink(self.monitor_config)] if writes else [])

    def write_events(self, event_list: Sequence[Event], flush: bool = True) -> None:
        """Write events ``(name, value, sample)``. Does nothing on ranks other than 0.

        ``flush``: wait until they are written, at most a second.
        """
        self._monitors.write(event_list)
        if flush:
            self._monitors.flush()


class TensorBoardMonitor(Monitor):
    """Event files under ``output_path/job_name``."""

    sink = TensorboardSink


class WandbMonitor(Monitor):
    """A run of Weights & Biases."""

    sink = WandbSink


class csvMonitor(Monitor):
    """One CSV file for each event name under ``output_path/job_name``."""

    sink = CsvSink


class CometMonitor(Monitor):
    """One Comet experiment."""

    sink = CometSink


class MonitorMaster(Monitor):
    """All monitors of a :class:`DeepSpeedMonitorConfig`, or of a full configuration."""

    def __init__(self, monitor_config: Any, monitors: Monitors | None = None) -> None:
        """``monitors``: those of an engine, to be used instead of new ones."""
        self.monitor_config = monitor_config
        if monitors is None:
            writes = monitor_config.enabled and current_rank_info().is_main_rank
            monitors = build_monitors(monitor_config) if writes else Monitors()
        self._monitors = monitors
        self.enabled = bool(monitors)
