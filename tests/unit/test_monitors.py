"""The monitors that receive the metrics of a run."""

from __future__ import annotations

import gc
import resource
import signal
import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest

from zeroshard.config.resolve import WATCHERS
from zeroshard.config.schema import Config
from zeroshard.config.sections import MonitorSections
from zeroshard.errors import ConfigError
from zeroshard.metrics import monitors as module
from zeroshard.metrics.monitors import Monitors, build_monitors
from zeroshard.metrics.sinks import SINKS, CometSink, CsvSink
from zeroshard.metrics.step_stream import StepEvent

OFF = SimpleNamespace(enabled=False)


def config(**sections: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**dict.fromkeys(SINKS, OFF) | sections)


def files(tmp_path, **more) -> SimpleNamespace:
    return SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job", **more)


WANDB = SimpleNamespace(enabled=True, project="p", group=None, team="t")
COMET = SimpleNamespace(
    enabled=True,
    samples_log_interval=100,
    project="p",
    workspace=None,
    api_key=None,
    experiment_name="run",
    experiment_key=None,
    online=None,
    mode=None,
)


class Recorder:
    """A fake of any package. Records calls as (name, args, kwargs)."""

    def __init__(self, **attributes: object) -> None:
        self.calls: list[tuple] = []
        self.__dict__.update(attributes)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


def test_nothing_enabled_means_no_sink():
    assert not build_monitors(config())


def test_each_sink_has_a_section_in_which_ranks_may_differ():
    assert SINKS.keys() == MonitorSections.model_fields.keys() <= Config.model_fields.keys()
    assert SINKS.keys() <= WATCHERS  # many programs log on rank 0 only


def test_events_carry_deepspeeds_names():
    event = StepEvent(4, 64, 0.0, {"train_loss": 2.5, "lr": 0.0, "loss_scale": 8.0})
    assert event.events == [
        ("Train/Samples/train_loss", 2.5, 64),
        ("Train/Samples/lr", 0.0, 64),
        ("Train/Samples/loss_scale", 8.0, 64),
    ]


def test_csv_keeps_one_file_per_event_name(tmp_path):
    monitors = build_monitors(config(csv_monitor=files(tmp_path)))
    monitors.write([("Train/Samples/lr", 0.5, 8), ("Train/Samples/train_loss", 3.0, 8)])
    monitors.write([("Train/Samples/lr", 0.25, 16)])
    monitors.close()
    rows = (tmp_path / "job/Train_Samples_lr.csv").read_text().split()
    assert rows == ["step,lr", "8,0.5", "16,0.25"]
    assert (tmp_path / "job/Train_Samples_train_loss.csv").read_text().startswith("step,train_loss")


def test_csv_of_a_resumed_run_is_appended(tmp_path):
    for step in (1, 2):
        CsvSink(files(tmp_path)).write([("a/b", 0.0, step)])
    assert (tmp_path / "job/a_b.csv").read_text().split() == ["step,b", "1,0.0", "2,0.0"]


@pytest.mark.parametrize(
    ("key", "section", "package", "wanted"),
    [
        ("tensorboard", files("x"), "tensorboard", "'zeroshard[monitor]'"),
        ("wandb", WANDB, "wandb", "'zeroshard[monitor]'"),
        ("comet", COMET, "comet_ml", "comet_ml"),
        ("trackio", SimpleNamespace(enabled=True), "trackio", "'zeroshard[monitor]'"),
        ("mlflow", SimpleNamespace(enabled=True), "mlflow", "'zeroshard[monitor]'"),
    ],
)
def test_a_missing_package_is_an_error_at_the_start(monkeypatch, key, section, package, wanted):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        build_monitors(config(**{key: section}))
    assert str(caught.value) == (
        f"{key}.enabled is true, but the package {package} cannot be imported; "
        f"install it (pip install {wanted}) or set {key}.enabled to false"
    )


def test_a_folder_that_cannot_be_made_is_an_error_at_the_start(tmp_path):
    (tmp_path / "job").touch()
    with pytest.raises(ConfigError, match=r"csv_monitor.output_path is .* cannot be written"):
        build_monitors(config(csv_monitor=files(tmp_path)))


def test_all_missing_packages_are_named_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"(?s)wandb.*comet_ml"):
        build_monitors(config(wandb=WANDB, comet=COMET))


def test_tensorboard_gets_scalars(monkeypatch, tmp_path):
    writer = Recorder()
    module = ModuleType("tensorboard")
    module.SummaryWriter = lambda folder: writer if folder == str(tmp_path / "job") else None
    monkeypatch.setitem(sys.modules, "tensorboard", module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monitors = build_monitors(config(tensorboard=files(tmp_path)))
    monitors.write([("a", 1.0, 2)])
    monitors.close()
    assert [call[:2] for call in writer.calls] == [
        ("add_scalar", ("a", 1.0, 2)),
        ("flush", ()),
        ("close", ()),
    ]


def test_wandb_opens_a_run_and_finishes_it(monkeypatch):
    wandb = Recorder(run=None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monitors = build_monitors(config(wandb=WANDB))
    monitors.write([("a", 1.0, 2)])
    monitors.close()
    assert wandb.calls == [
        ("init", (), {"project": "p", "group": None, "entity": "t"}),
        ("log", ({"a": 1.0},), {"step": 2}),
        ("finish", (), {}),
    ]


def test_wandb_joins_a_run_that_is_open_and_leaves_it_open(monkeypatch):
    wandb, run = Recorder(run=None), Recorder()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monitors = build_monitors(config(wandb=WANDB))
    wandb.run = run  # a Trainer opens its run after the engine was built
    monitors.write([("a", 1.0, 2)])
    monitors.close()
    assert not wandb.calls
    assert run.calls[-1] == ("log", ({"a": 1.0, "Train/Samples/samples": 2},), {})
    assert [name for name, *_ in run.calls] == ["define_metric", "define_metric", "log"]


def test_comet_sends_each_name_once_per_interval(monkeypatch):
    comet = Recorder(get_running_experiment=lambda: None)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    sink = CometSink(COMET)
    sink.find_run()
    sink.open()
    for step in (32, 64, 132, 140):
        sink.write([("a", 0.0, step), ("b", 0.0, step)])
    sink.close()
    assert comet.calls[:2] == [("start", (), {"project": "p"}), ("set_name", ("run",), {})]
    sent = [(args[0], kwargs["step"]) for name, args, kwargs in comet.calls if name == "log_metric"]
    assert sent == [("a", 32), ("b", 32), ("a", 132), ("b", 132)]
    assert comet.calls[-1][0] == "end"


def test_a_running_experiment_of_comet_is_joined_and_left_open(monkeypatch):
    experiment = Recorder()
    comet = Recorder(get_running_experiment=lambda: experiment)
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    monitors = build_monitors(config(comet=COMET))
    monitors.write([("a", 1.0, 2)])
    monitors.close()
    assert [name for name, *_ in experiment.calls] == ["log_metric"]


class Broken:
    """A sink whose disk is full."""

    def __init__(self):
        self.attempts = 0

    def write(self, events):
        self.attempts += 1
        raise OSError("no space left")

    def close(self):
        raise OSError("no space left")


class Kept:
    def __init__(self):
        self.events = []

    def write(self, events):
        self.events += events

    def close(self):
        self.events.append("closed")


def test_a_sink_that_fails_is_dropped_with_one_line_and_the_others_go_on(caplog):
    broken, kept = Broken(), Kept()
    monitors = Monitors([broken, kept])
    for step in (1, 2):
        monitors.write([("a", 0.0, step)])
        monitors.flush()
    monitors.close()
    assert broken.attempts == 1
    assert kept.events == [("a", 0.0, 1), ("a", 0.0, 2), "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "Broken could not write and is switched off; training continues (OSError: no space left)"
    ]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's
@pytest.mark.parametrize("key", ["csv_monitor", "tensorboard"])
def test_a_disk_that_becomes_full_costs_one_line_and_the_others_go_on(tmp_path, caplog, key):
    """The limit on the size of files stands for the disk: writes beyond it fail."""
    if key == "tensorboard":
        pytest.importorskip("tensorboard")  # tests/programs/test_trackers.py runs this with it
    kept = Kept()
    monitors = build_monitors(config(**{key: files(tmp_path)}))
    monitors.add(kept)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, old[1]))
        for step in range(400):
            monitors.write([("a", 0.5, step)])
            if step % 100 == 0:
                monitors.flush(10)
        monitors.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [event[2] for event in kept.events[:-1]] == [*range(400)]
    (line,) = [record.getMessage() for record in caplog.records]
    assert "is switched off; training continues (OSError: [Errno 27] File too large" in line


def test_a_sink_that_cannot_close_does_not_stop_the_run(caplog):
    sink = Broken()
    sink.write = lambda events: None
    monitors = Monitors([sink])
    monitors.write([("a", 0.0, 1)])
    monitors.close()
    assert "could not close" in caplog.text


class Stuck(Kept):
    """A sink whose server does not answer."""

    def __init__(self):
        super().__init__()
        self.answers, self.is_asked = threading.Event(), threading.Event()

    def write(self, events):
        self.is_asked.set()
        self.answers.wait(30)
        super().write(events)


def test_a_sink_that_blocks_costs_one_line_and_no_time_of_the_run(caplog, monkeypatch):
    monkeypatch.setattr(module, "BLOCKED_S", 0.6)
    stuck, kept = Stuck(), Kept()
    monitors = Monitors([stuck, kept])
    monitors.write([("a", 0.0, 1)])
    assert stuck.is_asked.wait(10)
    begin_s = time.monotonic()
    monitors.write([("a", 0.0, 2)])
    assert time.monotonic() < begin_s + 0.2
    monitors.close()
    stuck.answers.set()
    assert kept.events == [("a", 0.0, 1), ("a", 0.0, 2), "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "Stuck could not write within 1 s and is switched off; training continues"
    ]


def test_a_slow_sink_loses_its_oldest_events_and_they_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(module, "QUEUE", 3)
    slow = Stuck()
    monitors = Monitors([slow])
    monitors.write([("a", 0.0, 0)])
    assert slow.is_asked.wait(10)
    for step in range(1, 8):
        monitors.write([("a", 0.0, step)])
    slow.answers.set()
    monitors.close()
    assert [step for _, _, step in slow.events[:-1]] == [0, 5, 6, 7]
    assert [record.getMessage() for record in caplog.records] == [
        "Stuck is slower than the run: its oldest events are dropped",
        "Stuck lost 4 lists of events",
    ]


def test_a_function_of_the_program_gets_the_events_until_it_raises(caplog):
    seen = []

    def tell(events):
        seen.append(events)
        return 1 / (2 - len(seen))

    monitors = Monitors()
    assert not monitors
    monitors.add(tell)
    for step in range(4):
        monitors.write([("a", 0.0, step)])
        monitors.flush()
    monitors.close()
    assert seen == [[("a", 0.0, 0)], [("a", 0.0, 1)]]
    assert "tell could not write" in caplog.text


def test_monitors_that_are_dropped_leave_no_thread():
    kept = Kept()
    monitors = Monitors([kept])
    monitors.write([("a", 0.0, 1)])
    (thread,) = [each for each in threading.enumerate() if each.name == "zeroshard-Kept"]
    del monitors
    gc.collect()
    thread.join(10)
    assert kept.events == [("a", 0.0, 1), "closed"]
