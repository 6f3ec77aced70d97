"""A run that loses a rank and is started again ends as an undisturbed one, bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import warm_python

pytestmark = pytest.mark.timeout(150)

PROGRAM = """
import hashlib, os, signal, sys
import torch
import zeroshard

folder, kill_at = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
engine, *_ = zeroshard.initialize(
    model=model,
    model_parameters=model.parameters(),
    config={
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    },
)
engine.load_checkpoint(folder, missing_ok=True)
print("starts at", engine.global_steps)
for step in range(engine.global_steps, 6):
    if step == kill_at and engine.dp_rank == 1 and os.environ.get("ZEROSHARD_ATTEMPT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(100 + step)
    batch = torch.randn(8, 6, dtype=torch.float64).chunk(2)[engine.dp_rank]
    loss = engine(batch).square().mean()
    engine.backward(loss)
    engine.step()
    if engine.global_steps % 2 == 0:
        engine.save_checkpoint(folder, tag=f"step-{engine.global_steps}")
        engine.wait_for_checkpoint()
with zeroshard.zero.GatheredParameters(list(model.parameters())):
    values = repr([p.tolist() for p in model.parameters()])  # repr of a float keeps every bit
print("hash", hashlib.sha256(values.encode()).hexdigest())
"""


LAUNCH = """
import runpy
from zeroshard.launch import restart

restart.FIRST_WAIT_S = 0.5  # seconds; five of a user's
runpy.run_module("zeroshard.launch", run_name="__main__", alter_sys=True)
"""


def launched(folder, kill_at: int) -> subprocess.CompletedProcess[str]:
    script, saves = folder / "train.py", folder / f"ckpt{kill_at}"
    script.write_text(PROGRAM)
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    words = ["--nproc", "2", "--max-restarts", "2", "--checkpoint-dir", str(saves)]
    launcher = folder / "launch.py"
    launcher.write_text(LAUNCH)
    command = [sys.executable, str(launcher), *words, str(script), str(saves), str(kill_at)]
    return warm_python.run(command, timeout=120, cwd=folder, env=env, warm_ranks=True)


def said(done: subprocess.CompletedProcess[str], word: str) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(word)]


def test_a_killed_rank_is_restarted_and_no_bit_of_the_result_changes(tmp_path):
    undisturbed, killed = launched(tmp_path, -1), launched(tmp_path, 3)
    assert (undisturbed.returncode, killed.returncode) == (0, 0), killed.stderr
    assert said(killed, "starts at") == ["starts at 0"] * 2 + ["starts at 2"] * 2
    assert len(set(said(undisturbed, "hash") + said(killed, "hash"))) == 1
    assert "restart 1 of 2 in 0.5 s, from checkpoint 'step-2'" in killed.stderr
    assert "restart" not in undisturbed.stderr
