"""What cannot work is refused at the start with its own words: restarts, resuming, monitors, commands."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import zeroshard
from zeroshard.cli.main import main
from zeroshard.errors import CheckpointError, ConfigError, LaunchError, UsageError
from zeroshard.launch.hosts import Host
from zeroshard.launch.launch_plan import check_min_ranks, plan_launch
from zeroshard.launch.options import LaunchRequest
from zeroshard.launch.restart import next_ranks
from zeroshard.run.batch_note import BatchNote

Call = Callable[[Path], object]


def launch(**given: Any) -> Call:
    request = LaunchRequest("t.py", **given)
    return lambda _: plan_launch(request, {}, this_host=("h",), has_srun=False)


def engine(width: int = 3, resume: Any = None, **keys: Any) -> Any:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **keys}
    return zeroshard.initialize(model=torch.nn.Linear(width, 1), config=config, resume=resume)[0]


def without(package: str, key: str) -> Call:
    """The package of a monitor is not installed."""

    def call(_: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            engine(**{key: {"enabled": True}})

    return call


def no_folder(make: Callable[[str], Any]) -> Call:
    """A file is where a folder is wanted."""

    def call(folder: Path) -> None:
        (folder / "file").touch()
        make(str(folder / "file"))

    return call


def of_another_model(folder: Path) -> None:
    with engine() as saved:
        saved.save_checkpoint(folder)
    engine(width=5, resume=folder)


def damaged(folder: Path) -> None:
    with engine() as saved:
        saved.save_checkpoint(folder)
    for file in folder.glob("*/*.safetensors"):
        file.write_bytes(b"")
    engine(resume=folder)


TWO = [Host("h", (0, 1, 2))]
NOTE = BatchNote("run", 3, 9, 3, True, (3,))


def too_few(_: Path) -> None:
    raise LaunchError(next_ranks(TWO, {"h": (0,)}, 2, None).reason)


def no_smaller_world(_: Path) -> None:
    raise LaunchError(next_ranks(TWO, {"h": (0, 1)}, 1, NOTE).reason)


def command(*words: str) -> Call:
    """A command that ends with exit code 2 and one line."""

    def call(folder: Path) -> None:
        told = CliRunner().invoke(main, [word.format(folder) for word in words])
        assert told.exit_code == 2, told.output
        raise UsageError(told.output)

    return call


def preempt(folder: str) -> Any:
    return engine(preemption={"save_dir": folder})


def trust(**keys: Any) -> Call:
    return lambda _: engine(trust=keys)


CASES: list[tuple[str, Call, type[Exception], str]] = [
    ("tensorboard", without("tensorboard", "tensorboard"), ConfigError, "pip install"),
    ("wandb", without("wandb", "wandb"), ConfigError, "the package wandb cannot be imported"),
    ("comet", without("comet_ml", "comet"), ConfigError, "pip install comet_ml"),
    ("trackio", without("trackio", "trackio"), ConfigError, "set trackio.enabled to false"),
    ("mlflow", without("mlflow", "mlflow"), ConfigError, "mlflow.enabled is true, but the package"),
    (
        "csv folder",
        no_folder(lambda at: engine(csv_monitor={"enabled": True, "output_path": at})),
        ConfigError,
        "cannot be written",
    ),
    ("save_dir", no_folder(preempt), UsageError, "cannot be used as a directory of checkpoints"),
    ("nan_policy", trust(nan_policy="stop"), ConfigError, "trust.nan_policy"),
    ("max_rollbacks", trust(max_rollbacks=-1), ConfigError, "trust.max_rollbacks"),
    ("stragglers", trust(stragglers={"ratio": 1.0}), ConfigError, "trust.stragglers.ratio"),
    ("frozen_s", trust(frozen_s=0), ConfigError, "trust.frozen_s"),
    ("grace", trust(grace=5), ConfigError, "grace_s"),
    ("resume auto", lambda _: engine(resume="auto"), UsageError, "pass the directory: resume=DIR"),
    ("resume file", no_folder(lambda at: engine(resume=at)), CheckpointError, "is not a directory"),
    ("resume damaged", damaged, CheckpointError, "safetensors"),
    ("resume another model", of_another_model, CheckpointError, "weight"),
    ("min-ranks large", lambda _: check_min_ranks(4, 3), LaunchError, "more than the 3 ranks"),
    ("min-ranks 0", launch(min_ranks=0), LaunchError, "it must be at least 1"),
    ("min-ranks alone", launch(min_ranks=2), LaunchError, "no effect without --max-restarts"),
    ("max-restarts -1", launch(max_restarts=-1), LaunchError, "must be 0 (no restart) or more"),
    ("no checkpoint-dir", launch(max_restarts=2), LaunchError, "needs --checkpoint-dir DIR"),
    ("checkpoint-dir alone", launch(checkpoint_dir="c"), LaunchError, "without --max-restarts N"),
    ("check-slot alone", launch(check_slot="true"), LaunchError, "no effect without --min-ranks"),
    ("preempt-save-s", launch(preempt_save_s=-1.0), LaunchError, "--preempt-save-s is -1"),
    ("too few left", too_few, LaunchError, "1 rank of 3 can be used, and --min-ranks is 2."),
    ("no smaller world", no_smaller_world, LaunchError, "does not fit 1 to 2 ranks, only 3."),
    ("stacks of nothing", command("stacks", "{}/no"), UsageError, "is not a directory"),
    ("stacks of no run", command("stacks", "{}"), UsageError, "holds no run"),
    ("explain of no run", command("explain", "{}"), UsageError, "holds no run"),
    ("report of no run", command("report", "{}"), UsageError, "holds no run"),
    ("doctor ranks", command("doctor", "--ranks", "0"), UsageError, "--ranks"),
]


@pytest.mark.parametrize(
    ("call", "kind", "text"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_it_is_refused_in_words(tmp_path, monkeypatch, call, kind, text):
    monkeypatch.delenv("ZEROSHARD_CHECKPOINT_DIR", raising=False)
    with pytest.raises(Exception) as caught:  # the kind is compared below
        call(tmp_path)
    assert type(caught.value) is kind, caught.value
    assert text in str(caught.value)
    assert "Traceback" not in str(caught.value)
