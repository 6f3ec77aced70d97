"""Trains with every tracker that is installed and reads back what each of them kept.

Writes what it found to the file named by the first argument, as JSON: {tracker: {name: [[step, value]]}}.
The second argument: "own" (trackers are opened by the engine) or "joined" (by the program).
"""

from __future__ import annotations

import contextlib
import csv
import json
import os
import sqlite3
import struct
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

import zeroshard

FOLDER = Path.cwd()
STEPS = 6
Found = dict[str, list[tuple[int, float]]]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))


def config() -> dict:
    return {
        "train_batch_size": 8,
        "gradient_clipping": 0.05,
        "zero_optimization": {"stage": 2},
        "wall_clock_breakdown": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
        "trust": {"dump_dir": str(FOLDER / "runs")},
        "tensorboard": {"enabled": True, "output_path": str(FOLDER), "job_name": "tensorboard"},
        "csv_monitor": {"enabled": True, "output_path": str(FOLDER), "job_name": "csv"},
        "wandb": {"enabled": True, "project": "p"},
        "trackio": {"enabled": True, "project": "p"},
        "mlflow": {
            "enabled": True,
            "tracking_uri": f"sqlite:///{FOLDER}/mlflow.db",
            "run_name": "tracked",
        },
    }


def train() -> dict:
    """Train, and return what a function of the program was told, and the losses."""
    torch.manual_seed(0)
    told: Found = defaultdict(list)

    def tell(events):
        for name, value, step in events:
            told[name].append((step, value))

    losses = []
    with zeroshard.Engine(Model(), config=config()) as engine:
        engine.monitors.add(tell)
        for _ in range(STEPS):
            ids = torch.randint(0, 50, (8, 5))
            loss = engine(input_ids=ids).square().mean()
            losses.append(float(loss.detach()))
            engine.backward(loss)
            engine.step()
    return {"function": told, "losses": losses}


def of_tensorboard() -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(FOLDER / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def of_csv() -> Found:
    found = {}
    for path in (FOLDER / "csv").glob("*.csv"):
        rows = list(csv.reader(path.open()))[1:]
        # "elapsed_time_ms_step" has underscores of its own
        name = path.stem.replace("Train_Samples_", "Train/Samples/", 1)
        found[name] = [(int(step), float(value)) for step, value in rows]
    return found


def of_wandb() -> Found:
    """The offline file: records of wandb's protocol in the blocks of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = FOLDER.glob("wandb/offline-run-*/*.wandb")
    raw, at, part, found = path.read_bytes(), 7, b"", defaultdict(list)
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:  # the end of a block is not used
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", raw[at : at + 7])
        part += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if kind not in (1, 4):  # all of a record, or its end
            continue
        record, part = Record.FromString(part), b""
        if record.WhichOneof("record_type") != "history":
            continue
        row = {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        step = row.get("Train/Samples/samples", row.get("_step", record.history.step.num))
        for name, value in row.items():
            if name.startswith("Train/") and name != "Train/Samples/samples":
                found[name].append((int(step), value))
    return found


def of_trackio() -> Found:
    (path,) = (FOLDER / "trackio").glob("*.db")
    found = defaultdict(list)
    with contextlib.closing(sqlite3.connect(path)) as base:
        rows = base.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    for step, text in rows:
        metrics = json.loads(text)
        step = metrics.pop("Train/Samples/samples", step)
        for name, value in metrics.items():
            if name.startswith("Train/"):
                found[name].append((int(step), value))
    return found


def of_mlflow() -> Found:
    found = defaultdict(list)
    with contextlib.closing(sqlite3.connect(FOLDER / "mlflow.db")) as base:
        for key, step, value in base.execute("SELECT key, step, value FROM metrics ORDER BY step"):
            found[key].append((step, value))
    return found


def of_record() -> Found:
    found = defaultdict(list)
    (path,) = (FOLDER / "runs").glob("*/steps-*.jsonl")
    for line in map(json.loads, path.read_text().splitlines()):
        if line["kind"] == "step":
            for name, value in line.items():
                if name not in ("kind", "step", "samples", "time_s"):
                    found[f"Train/Samples/{name}"].append((line["samples"], value))
    return found


def use_this_folder() -> None:
    """Let every tracker store its runs below the current directory, without a server."""
    os.environ.update(
        WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(FOLDER),
        TRACKIO_DIR=str(FOLDER / "trackio"), MLFLOW_TRACKING_URI=f"sqlite:///{FOLDER}/mlflow.db",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip


def main() -> None:
    use_this_folder()
    joins = sys.argv[2] == "joined"
    if joins:
        import mlflow
        import trackio
        import wandb

        runs = wandb.init(project="mine"), trackio.init(project="mine", embed=False)
        runs[0].log({"my/loss": 1.0})
        mlflow.set_experiment("mine")
        active = mlflow.start_run(run_name="mine")
    found = train()
    if joins:
        runs[0].log({"my/loss": 2.0})  # the program's runs are still open
        mlflow.log_metric("my/loss", 2.0)
        assert mlflow.active_run().info.run_id == active.info.run_id
        mlflow.end_run()
        runs[0].finish()
        runs[1].finish()
    found |= {
        "tensorboard": of_tensorboard(), "csv": of_csv(), "wandb": of_wandb(),
        "trackio": of_trackio(), "mlflow": of_mlflow(), "record": of_record(),
    }  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
