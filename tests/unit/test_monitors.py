"""The monitors that receive the metrics of a run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from zeroshard.engine.monitors import CometSink, CsvSink, Monitors, build_monitors, train_events
from zeroshard.errors import ConfigError

OFF = SimpleNamespace(enabled=False)


def config(**sections: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(
        **{"tensorboard": OFF, "csv_monitor": OFF, "wandb": OFF, "comet": OFF, **sections}
    )


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


def test_events_carry_deepspeeds_names():
    assert train_events(64, lr=0.1, loss_scale=8.0, train_loss=2.5) == [
        ("Train/Samples/train_loss", 2.5, 64),
        ("Train/Samples/lr", 0.1, 64),
        ("Train/Samples/loss_scale", 8.0, 64),
    ]


def test_an_event_without_a_value_is_left_out():
    assert train_events(64, lr=0.0) == [("Train/Samples/lr", 0.0, 64)]


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
    ("key", "section", "module", "package", "wanted"),
    [
        (
            "tensorboard",
            files("x"),
            "torch.utils.tensorboard",
            "tensorboard",
            "'zeroshard[monitor]'",
        ),
        ("wandb", WANDB, "wandb", "wandb", "'zeroshard[monitor]'"),
        ("comet", COMET, "comet_ml", "comet_ml", "comet_ml"),
    ],
)
def test_a_missing_package_is_an_error_at_the_start(
    monkeypatch, key, section, module, package, wanted
):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as caught:
        build_monitors(config(**{key: section}))
    assert str(caught.value) == (
        f"{key}.enabled is true, but the package {package} cannot be imported (import of {module} "
        f"halted; None in sys.modules); install it (pip install {wanted}) or set {key}.enabled to "
        "false"
    )


def test_all_missing_packages_are_named_at_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ConfigError, match=r"(?s)wandb.*comet_ml"):
        build_monitors(config(wandb=WANDB, comet=COMET))


def test_tensorboard_gets_scalars(monkeypatch, tmp_path):
    writer = Recorder()
    module = ModuleType("tensorboard")
    module.SummaryWriter = lambda folder: writer if folder == str(tmp_path / "job") else None
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
    wandb = Recorder(run="open")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monitors = build_monitors(config(wandb=WANDB))
    monitors.write([("a", 1.0, 2)])
    monitors.close()
    assert [name for name, *_ in wandb.calls] == ["log"]


def test_comet_sends_each_name_once_per_interval(monkeypatch):
    comet = Recorder()
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    sink = CometSink(COMET)
    for step in (32, 64, 132, 140):
        sink.write([("a", 0.0, step), ("b", 0.0, step)])
    sink.close()
    assert comet.calls[:2] == [("start", (), {"project": "p"}), ("set_name", ("run",), {})]
    sent = [(args[0], kwargs["step"]) for name, args, kwargs in comet.calls if name == "log_metric"]
    assert sent == [("a", 32), ("b", 32), ("a", 132), ("b", 132)]


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
    monitors.close()
    assert broken.attempts == 1
    assert kept.events == [("a", 0.0, 1), ("a", 0.0, 2), "closed"]
    assert [record.getMessage() for record in caplog.records] == [
        "Broken could not write and is switched off; training continues (OSError: no space left)"
    ]


def test_a_sink_that_cannot_close_does_not_stop_the_run(caplog):
    Monitors([Broken()]).close()
    assert "could not close" in caplog.text
