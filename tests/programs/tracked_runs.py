"""Trains with Transformers' Trainer, or with Accelerate, which open runs of MLflow, wandb and Trackio.

The second argument: "trainer" or "accelerate"; or "read", in a process after that one
(wandb may still write before): what the runs hold goes to the file named by the first argument, as JSON:
how many runs there are, and {tracker: {name: [[step, value]]}}.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import sys
from pathlib import Path

import torch
from torch import nn
from tracked import FOLDER, Model, of_mlflow, of_trackio, of_wandb, use_this_folder

use_this_folder()
TRACKERS = ("mlflow", "wandb", "trackio")
CONFIG = {
    "zero_optimization": {"stage": 2},
    "trust": {"report": False},
    **{name: {"enabled": True} for name in TRACKERS},
}


def run_trainer() -> None:
    from transformers import TrainingArguments

    from zeroshard.integrations.transformers import Trainer

    class WithLoss(Model):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    ids = torch.randint(0, 50, (24, 5))
    args = TrainingArguments(
        str(FOLDER / "out"), use_cpu=True, report_to=list(TRACKERS), run_name="theirs", max_steps=3,
        per_device_train_batch_size=8, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(WithLoss(), args, zeroshard_config=CONFIG, train_dataset=rows)
    trainer.train()


def run_accelerate() -> None:
    from torch.utils.data import DataLoader

    from zeroshard.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, config=CONFIG, log_with=list(TRACKERS), project_dir=FOLDER)
    accelerator.init_trackers("theirs")
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(torch.randint(0, 50, (24, 5)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for step, ids in enumerate(loader):
        accelerator.backward(model(input_ids=ids).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"theirs": 1.0}, step=step)
    accelerator.end_training()


def read() -> None:
    with contextlib.closing(sqlite3.connect(FOLDER / "mlflow.db")) as base:
        runs = {"mlflow": base.execute("SELECT count(*) FROM runs").fetchone()[0]}
    runs["wandb"] = len(list(FOLDER.glob("wandb/offline-run-*")))
    (path,) = (FOLDER / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(path)) as base:
        names = base.execute("SELECT count(DISTINCT run_name) FROM metrics").fetchone()
        runs["trackio"] = names[0]
    kept = {"mlflow": of_mlflow(), "wandb": of_wandb(), "trackio": of_trackio()}
    Path(sys.argv[1]).write_text(json.dumps({"runs": runs, "kept": kept}))


if __name__ == "__main__":
    torch.manual_seed(0)
    {"trainer": run_trainer, "accelerate": run_accelerate, "read": read}[sys.argv[2]]()
