"""A run that a signal asks to make room saves, ends with exit code 0, and continues to the bit."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from support import pipeline_models as models
from torch import nn
from warm_python import WarmPython
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.parallel import pipeline

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import hashlib, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader
import zeroshard

folder, stage, slow_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        return torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(at))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
engine, *_ = zeroshard.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 8,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "preemption": {"save_dir": folder},
    },
)
engine.load_checkpoint(folder, missing_ok=True)
print("starts at", engine.global_steps, flush=True)
mine = torch.utils.data.Subset(Rows(), range(engine.dp_rank, 64, 2))
loader = DataLoader(mine, batch_size=4, num_workers=4)
for step, batch in enumerate(loader):
    if step < engine.global_steps:
        continue
    if step == slow_at:
        Path(folder, f"rank{engine.dp_rank}").touch()
        if engine.dp_rank == 1:
            time.sleep(3)  # the other rank waits in a collective
    engine.backward(engine(batch).square().mean())
    engine.step()
with zeroshard.zero.GatheredParameters(list(model.parameters())):
    values = repr([p.tolist() for p in model.parameters()])  # repr of a float keeps every bit
print("hash", hashlib.sha256(values.encode()).hexdigest(), flush=True)
"""


def start(folder: Path, stage: int, slow_at: int) -> WarmPython:
    script, saves = folder / "train.py", folder / "saves"
    script.write_text(PROGRAM)
    saves.mkdir(exist_ok=True)
    words = ["--nproc", "2", "--preempt-save-s", "30", str(script), str(saves), str(stage)]
    return WarmPython(
        [sys.executable, "-m", "zeroshard.launch", *words, str(slow_at)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
        warm_ranks=True,
    )


def said(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(word)]


def test_a_signal_while_a_rank_waits_loses_no_bit(tmp_path):
    stage, number = 3, signal.SIGTERM
    (tmp_path / "whole").mkdir()
    whole, _ = start(tmp_path / "whole", stage, -1).communicate(timeout=100)
    run = start(tmp_path, stage, 3)
    arrived = tmp_path / "saves" / "rank0"
    for _ in range(600):
        if arrived.exists():
            break
        time.sleep(0.1)
    time.sleep(0.5)
    run.send_signal(number)
    sent_s = time.monotonic()
    _, errors = run.communicate(timeout=60)  # of ranks and their workers too, so all have ended
    assert run.returncode == 0, errors
    assert time.monotonic() - sent_s < 13  # 3 of which the slow rank sleeps
    assert f"ranks 0-1 ended with exit code 0 after {number.name}" in errors
    marker = json.loads((tmp_path / "saves" / "preempted").read_text())
    assert marker["signal"].startswith(number.name)
    assert 4 <= marker["step"] < 8
    rest, _ = start(tmp_path, stage, -1).communicate(timeout=100)
    assert said(rest, "starts at") == [f"starts at {marker['step']}"] * 2
    assert len(set(said(whole, "hash") + said(rest, "hash"))) == 1


def model_engine(stage: int, save_dir: Path) -> Engine:
    keys = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        "preemption": {"save_dir": str(save_dir)},
    }
    torch.manual_seed(0)
    return Engine(nn.Linear(2, 1), config=keys)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_an_evaluation_is_interrupted(stage, tmp_path):
    """At stage 1 nothing couples the forwards of ranks, and one of them evaluates longer."""
    engine = model_engine(stage, tmp_path)
    x = torch.ones(1, 2)
    engine.backward(engine(x).sum())
    engine.step()
    more = 30 * engine.dp_rank if stage == 1 else 0
    with pytest.raises(SystemExit) as ended:
        for at in range(150 + more):
            if at == 3 and engine.dp_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            with torch.no_grad():
                engine(x)
            time.sleep(0.05)
        engine(x)  # training goes on
        pytest.fail("the evaluation was not interrupted")
    assert ended.value.code == 0
    if engine.is_main_rank:
        assert json.loads((tmp_path / "preempted").read_text())["step"] == 1


@pytest.mark.parametrize("in_evaluation", [False, True])
@on_ranks(2)
def test_a_pipeline_stops_between_two_steps(in_evaluation, tmp_path):
    model = pipeline(
        models.Decoder(), split=["layers.2"], order=models.ORDER, loss_fn=models.loss_fn
    )
    keys = models.config(1, parallel={"pipeline": 2}, preemption={"save_dir": str(tmp_path)})
    engine = Engine(model, config=keys, optimizer=models.adamw)

    def batches():
        return iter(models.batches(0, 0))

    engine.train_batch(batches())
    run = engine.eval_batch if in_evaluation else engine.train_batch
    with pytest.raises(SystemExit) as ended:
        for at in range(400):
            if at == 2 and engine.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            run(batches())
            time.sleep(0.02)
    assert ended.value.code == 0
    if engine.is_main_rank:
        step = json.loads((tmp_path / "preempted").read_text())["step"]
        assert step == 1 if in_evaluation else step > 2
