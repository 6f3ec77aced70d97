"""Lets programs send events to the monitors of a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from zeroshard.comm.env import current_rank_info
from zeroshard.config.sections import MonitorSections
from zeroshard.metrics.monitors import Monitors, build_monitors
from zeroshard.metrics.sinks import CometSink, CsvSink, Event, TensorboardSink, WandbSink


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
