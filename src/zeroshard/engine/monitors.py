"""Sends the numbers of a run to TensorBoard, CSV files, Weights & Biases and Comet.

There is a sink for each of the sections ``tensorboard``, ``csv_monitor``, ``wandb`` and ``comet``, with
DeepSpeed's event names. A missing package is an error at the start of the run. A sink that fails later is
dropped with one line in the log, and training goes on. Only rank 0 should build sinks.
"""

from __future__ import annotations

import csv
import importlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zeroshard.errors import ConfigError

_log = logging.getLogger(__name__)

LR = "Train/Samples/lr"
LOSS_SCALE = "Train/Samples/loss_scale"
TRAIN_LOSS = "Train/Samples/train_loss"

Event = tuple[str, float, int]
"""``(name, value, step)``; the step counts samples over all ranks."""


class Sink(Protocol):
    """One destination of events."""

    def write(self, events: Sequence[Event]) -> None: ...
    def close(self) -> None: ...


class TensorboardSink:
    """Event files under ``output_path/job_name``."""

    def __init__(self, section: Any) -> None:
        module = _need("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(Path(section.output_path) / section.job_name))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CsvSink:
    """One file per event name under ``output_path/job_name``, with columns step and value.

    A resumed run appends to the files.
    """

    def __init__(self, section: Any) -> None:
        self._folder = Path(section.output_path) / section.job_name
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([step, value])

    def close(self) -> None:
        """Nothing: no file stays open between two writes."""


class WandbSink:
    """The run that is open in this process, or a new one, which is finished at the end."""

    def __init__(self, section: Any) -> None:
        self._wandb = _need("wandb", "wandb", "wandb")
        self._owned = self._wandb.run is None
        if self._owned:
            self._wandb.init(project=section.project, group=section.group, entity=section.team)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._wandb.log({name: value}, step=step)

    def close(self) -> None:
        if self._owned:
            self._wandb.finish()


class CometSink:
    """One Comet experiment. An event name is sent at most once per ``samples_log_interval`` samples."""

    def __init__(self, section: Any) -> None:
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        given = {name: getattr(section, name) for name in names}
        self._experiment = _need("comet_ml", "comet", "comet_ml").start(
            **{name: value for name, value in given.items() if value is not None}
        )
        if section.experiment_name is not None:
            self._experiment.set_name(section.experiment_name)
        self._interval = section.samples_log_interval
        self._sent: dict[str, int] = {}

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if name not in self._sent or step - self._sent[name] >= self._interval:
                self._experiment.log_metric(name, value, step=step)
                self._sent[name] = step

    def close(self) -> None:
        self._experiment.end()


class Monitors:
    """All sinks of a run. Its methods never raise. ``bool()`` is false without sinks."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = list(sinks)

    def __bool__(self) -> bool:
        return bool(self._sinks)

    def write(self, events: Sequence[Event]) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.write(events)
            except Exception as error:
                self._drop(sink, "write", error)

    def close(self) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.close()
            except Exception as error:
                self._drop(sink, "close", error)
        self._sinks.clear()

    def _drop(self, sink: Sink, what: str, error: Exception) -> None:
        self._sinks.remove(sink)
        _log.warning(
            "%s could not %s and is switched off; training continues (%s: %s)",
            type(sink).__name__,
            what,
            type(error).__name__,
            error,
        )


_SINKS: dict[str, type[Any]] = {
    "tensorboard": TensorboardSink,
    "csv_monitor": CsvSink,
    "wandb": WandbSink,
    "comet": CometSink,
}


def build_monitors(config: Any) -> Monitors:
    """A sink for every monitor section of ``config`` that is enabled.

    Raises:
        ConfigError: packages are missing. The text names all that are to be installed.
    """
    sinks: list[Sink] = []
    problems: list[str] = []
    for key, sink in _SINKS.items():
        section = getattr(config, key)
        if section.enabled:
            try:
                sinks.append(sink(section))
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        Monitors(sinks).close()
        raise ConfigError("\n".join(problems))
    return Monitors(sinks)


def train_events(
    samples: int,
    *,
    lr: float | None = None,
    loss_scale: float | None = None,
    train_loss: float | None = None,
) -> list[Event]:
    """The events of one step under DeepSpeed's names. Values that are None are left out."""
    values = ((TRAIN_LOSS, train_loss), (LR, lr), (LOSS_SCALE, loss_scale))
    return [(name, value, samples) for name, value in values if value is not None]


def _need(module: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        wanted = package if package == "comet_ml" else "'zeroshard[monitor]'"
        raise ConfigError(
            f"{key}.enabled is true, but the package {package} cannot be imported ({error}); "
            f"install it (pip install {wanted}) or set {key}.enabled to false"
        ) from error
