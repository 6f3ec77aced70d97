"""Where events go: TensorBoard, CSV files, Weights & Biases, Comet, Trackio, MLflow, a callable.

A sink is a class with the methods of :class:`Sink`. Its constructor runs at the start of the run and
raises :class:`ConfigError` for what the user has to change. Everything else runs in a thread of its own
(:mod:`zeroshard.metrics.monitors`), except :meth:`Sink.find_run`.

A tracker that the program, Transformers' Trainer or Accelerate has opened is joined: its run gets the
events, and stays open. A Trainer opens it after the engine was built. So a sink opens a run of its own no
earlier than with its first events.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError

Event = tuple[str, float, int]
"""``(name, value, samples)``: the samples of all ranks until then. A sink sees no number of steps."""

SAMPLES = "Train/Samples/samples"
"""The metric that events are drawn over in a run that was joined, whose steps belong to the program."""


class Sink:
    """One destination of events."""

    def find_run(self) -> None:
        """Look for a run that the program has opened. Called once, by the program's thread."""

    def open(self) -> None:
        """Open what :meth:`write` needs. Called once, after :meth:`find_run`."""

    def write(self, events: Sequence[Event]) -> None:
        """Store the events, which are of one step unless the program sent them. Values may be NaN."""
        raise NotImplementedError

    def close(self) -> None:
        """Write what is buffered. Runs that the program opened stay open."""


class TensorboardSink(Sink):
    """Event files under ``output_path/job_name``."""

    def __init__(self, section: Any) -> None:
        self._module = need("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._folder = _own_folder(section, "tensorboard")

    def open(self) -> None:
        self._writer = self._module.SummaryWriter(str(self._folder))

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class CsvSink(Sink):
    """One file per event name under ``output_path/job_name``, with columns step and value.

    A resumed run appends to the files.
    """

    def __init__(self, section: Any) -> None:
        self._folder = _own_folder(section, "csv_monitor")

    def write(self, events: Sequence[Event]) -> None:
        """No file stays open between two writes."""
        for name, value, step in events:
            path = self._folder / f"{name.replace('/', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.writer(file)
                if is_new:
                    writer.writerow(["step", name.rsplit("/", 1)[-1]])
                writer.writerow([step, value])


class LoggedRunSink(Sink):
    """A run with ``log`` and ``finish``: one that is open in this process, or a new one.

    A new one is finished at the end. One of the program counts steps of its own, so each log of ours
    has the number of samples beside its values.
    """

    def __init__(self, section: Any) -> None:
        self._section = section
        self._run: Any = None
        self._owned = False

    def write(self, events: Sequence[Event]) -> None:
        for step, values in by_step(events).items():
            if self._owned:
                self._run.log(values, step=step)
            else:
                self._run.log({**values, SAMPLES: step})

    def close(self) -> None:
        if self._owned:
            self._run.finish()


class WandbSink(LoggedRunSink):
    """A run of wandb."""

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self._wandb = need("wandb", "wandb", "wandb")

    def find_run(self) -> None:
        self._run = self._wandb.run

    def open(self) -> None:
        section = self._section
        if self._run is None:
            self._owned = True
            self._run = self._wandb.init(
                project=section.project, group=section.group, entity=section.team
            )
        else:
            self._run.define_metric(SAMPLES, hidden=True)
            self._run.define_metric("Train/Samples/*", step_metric=SAMPLES)


class TrackioSink(LoggedRunSink):
    """A run of Trackio."""

    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self._trackio = need("trackio", "trackio", "trackio")

    def find_run(self) -> None:
        variables = importlib.import_module("trackio.context_vars")
        self._run = variables.current_run.get()

    def open(self) -> None:
        section = self._section
        if self._run is None:
            self._owned = True
            self._run = self._trackio.init(
                project=section.project, space_id=section.space_id, embed=False
            )


class MlflowSink(Sink):
    """The run that is active in the program's thread, or a new one, which is ended at the end."""

    def __init__(self, section: Any) -> None:
        self._mlflow = need("mlflow", "mlflow", "mlflow")
        self._section = section
        self._run_id: str | None = None
        self._owned = False

    def find_run(self) -> None:
        """A run is active in one thread only."""
        run = self._mlflow.active_run()
        self._run_id = None if run is None else run.info.run_id

    def open(self) -> None:
        section = self._section
        if section.tracking_uri is not None:
            self._mlflow.set_tracking_uri(section.tracking_uri)
        self._client = self._mlflow.MlflowClient()
        if self._run_id is None:
            self._owned = True
            experiment = self._mlflow.set_experiment(section.experiment)
            run = self._client.create_run(experiment.experiment_id, run_name=section.run_name)
            self._run_id = run.info.run_id

    def write(self, events: Sequence[Event]) -> None:
        metric, now_ms = self._mlflow.entities.Metric, int(1e3 * time.time())
        self._client.log_batch(
            self._run_id,
            metrics=[metric(name, value, now_ms, step) for name, value, step in events],
        )

    def close(self) -> None:
        if self._owned:
            self._client.set_terminated(self._run_id)


class CometSink(Sink):
    """The experiment that is running in this process, or a new one, which is ended at the end.

    An event name is sent at most once per ``samples_log_interval`` samples.
    """

    def __init__(self, section: Any) -> None:
        self._comet = need("comet_ml", "comet", "comet_ml")
        self._section = section
        self._experiment: Any = None
        self._owned = False
        self._sent: dict[str, int] = {}

    def find_run(self) -> None:
        self._experiment = self._comet.get_running_experiment()

    def open(self) -> None:
        if self._experiment is not None:
            return
        self._owned = True
        names = ("api_key", "project", "workspace", "experiment_key", "mode", "online")
        given = {name: getattr(self._section, name) for name in names}
        self._experiment = self._comet.start(
            **{name: value for name, value in given.items() if value is not None}
        )
        if self._section.experiment_name is not None:
            self._experiment.set_name(self._section.experiment_name)

    def write(self, events: Sequence[Event]) -> None:
        for name, value, step in events:
            if (
                name not in self._sent
                or step - self._sent[name] >= self._section.samples_log_interval
            ):
                self._experiment.log_metric(name, value, step=step)
                self._sent[name] = step

    def close(self) -> None:
        if self._owned:
            self._experiment.end()


class CallableSink(Sink):
    """Calls a function of the program with each list of events, in a thread of its own."""

    def __init__(self, call: Callable[[Sequence[Event]], object]) -> None:
        self._call = call
        self.__name__ = getattr(call, "__qualname__", type(call).__qualname__)

    def write(self, events: Sequence[Event]) -> None:
        self._call(events)


#: The classes by their sections of the configuration.
SINKS: dict[str, type[Any]] = {
    "tensorboard": TensorboardSink,
    "csv_monitor": CsvSink,
    "wandb": WandbSink,
    "comet": CometSink,
    "trackio": TrackioSink,
    "mlflow": MlflowSink,
}

_MODULES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "comet": "comet_ml",
    "trackio": "trackio",
    "mlflow": "mlflow",
}


def by_step(events: Sequence[Event]) -> dict[int, dict[str, float]]:
    """Values by name, for each step.

    >>> by_step([("loss", 0.5, 8), ("lr", 0.1, 8)])
    {8: {'loss': 0.5, 'lr': 0.1}}
    """
    steps: dict[int, dict[str, float]] = {}
    for name, value, step in events:
        steps.setdefault(step, {})[name] = value
    return steps


def check_packages(config: Any) -> None:
    """Check that the packages of all enabled sections are installed. Every rank does, and imports none.

    Raises:
        ConfigError: some are missing. The text names all that are to be installed.
    """
    missing = [
        _missing(key, module)
        for key, module in _MODULES.items()
        if getattr(config, key).enabled and not _is_installed(module)
    ]
    if missing:
        raise ConfigError("\n".join(missing))


def _is_installed(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def need(module: str, key: str, package: str) -> Any:
    """The module that a section needs.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(_missing(key, package, f" ({error})")) from error


def _missing(key: str, package: str, reason: str = "") -> str:
    wanted = package if package == "comet_ml" else "'zeroshard[monitor]'"
    return (
        f"{key}.enabled is true, but the package {package} cannot be imported{reason}; "
        f"install it (pip install {wanted}) or set {key}.enabled to false"
    )


def _own_folder(section: Any, key: str) -> Path:
    """Make ``output_path/job_name``, and check that files can be written there."""
    folder: Path = Path(section.output_path) / section.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write in {folder}")
    except OSError as error:
        raise ConfigError(
            f"{key}.output_path is {section.output_path!r}, and the folder {folder} cannot be written: "
            f"{error}. Give a folder that can be, or set {key}.enabled to false"
        ) from error
    return folder
