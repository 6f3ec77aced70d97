"""The same program gives the same numbers with ZeroShard and with the real DeepSpeed, if that is
installed.

DeepSpeed is not part of the test environment. Install it with ``pip install deepspeed``, or set
``ZEROSHARD_TEST_DEEPSPEED`` to a folder that contains it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest

from zeroshard.deepspeed.api_table import VERSION
from zeroshard.deepspeed.install import DIRECTORY

pytestmark = pytest.mark.timeout(320)

ROOT = Path(__file__).parents[2]
TRACKERS = ROOT / ".trackers"

PROGRAM = """
import json, sys
import deepspeed
import torch
from torch import nn

stage, schedule = int(sys.argv[1]), sys.argv[2]
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
engine, optimizer, _, _ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {"type": schedule, "params": {"warmup_num_steps": 4, "total_num_steps": 12}},
    "zero_optimization": {"stage": stage},
})
numbers = []
rank = deepspeed.comm.get_rank()
for step in range(24):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + rank))
    loss = (engine(x) - x.sum(1, keepdim=True)).square().mean()
    engine.backward(loss)
    engine.step()
    numbers.append(loss.item())
    if engine.global_steps * 2 == step + 1:
        numbers += [float(engine.get_global_grad_norm()), *engine.get_lr()]
if rank == 0:
    print("NUMBERS", json.dumps(numbers))
"""


def peer() -> str:
    """The folder of the real DeepSpeed; empty if there is none."""
    if named := os.environ.get("ZEROSHARD_TEST_DEEPSPEED"):
        return named
    try:
        found = util.find_spec("deepspeed")
        is_real = found is not None and metadata.version("deepspeed") != VERSION
    except (ImportError, metadata.PackageNotFoundError):
        return ""
    return str(Path(found.origin).parents[1]) if is_real and found and found.origin else ""


STATES = """
import json, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

stage, begins = int(sys.argv[1]), sys.argv[2] == "DeepSpeed"
if begins:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    plugin = DeepSpeedPlugin(zero_stage=stage, gradient_clipping=0.5)
    on_gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[on_gloo])
else:
    from zeroshard.integrations.accelerate import Accelerator

    config = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.5}
    accelerator = Accelerator(cpu=True, config=config)
torch.manual_seed(0 if begins else 1)  # other weights: they have to be loaded
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(32, 8, generator=torch.Generator().manual_seed(2))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if not begins:
    accelerator.load_state("state")
losses = []
for step, (inputs, wanted) in enumerate(loader):
    if step < 4 and not begins:
        continue
    if step == 4 and begins:
        accelerator.save_state("state")
        losses.clear()
    loss = nn.functional.mse_loss(model(inputs), wanted)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if accelerator.is_main_process:
    print("NUMBERS", json.dumps(losses), flush=True)
"""


MONITORED = """
import csv, json, os, sys
from pathlib import Path
import deepspeed
import torch
from torch import nn

kind, folder, trackers = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
deepspeed.get_accelerator().is_fp16_supported = lambda: True  # the real one refuses fp16 on CPUs
deepspeed.init_distributed(dist_backend="gloo")
rank = deepspeed.comm.get_rank()


def loss_fn(out, wanted):
    return (out - wanted).square().mean()


def batch(number):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * number + rank))
    x = x.half() if kind.endswith("fp16") else x
    return x, x.sum(1, keepdim=True)


torch.manual_seed(0)
layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)]
model = nn.Sequential(*layers)
if kind == "pipeline":
    model = deepspeed.pipe.PipelineModule(layers=layers, num_stages=1, loss_fn=loss_fn)
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_num_steps": 4, "total_num_steps": 12},
    },
    "zero_optimization": {"stage": 1},
    "gradient_clipping": 0.5 if kind == "clipped fp16" else 0,
    "data_types": {"grad_accum_dtype": "fp16" if kind.endswith("fp16") else "fp32"},
    "fp16": {"enabled": kind.endswith("fp16"), "initial_scale_power": 16, "loss_scale_window": 2},
    "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
    "tensorboard": {"enabled": bool(trackers), "output_path": str(folder), "job_name": "tb"},
})
data = iter([batch(number) for number in range(14)])
for _ in range(7 if kind == "pipeline" else 14):
    if kind == "pipeline":
        engine.train_batch(data)
    else:
        x, wanted = next(data)
        engine.backward(loss_fn(engine(x), wanted))
        engine.step()
if hasattr(engine, "close"):
    engine.close()
if rank == 0:
    found = {}
    for path in (folder / "csv").glob("*.csv"):
        rows = list(csv.reader(path.open()))
        found[f"csv {path.stem}"] = [[int(step), float(value)] for step, value in rows[1:]]
    if trackers:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "tb"))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found[f"tensorboard {tag}"] = [[each.step, each.value] for each in events.Scalars(tag)]
    print("NUMBERS", json.dumps(found), flush=True)
torch.distributed.barrier()
os._exit(0)
"""


def numbers_with(directory: str, folder: Path, *words: str, program: str = PROGRAM) -> Any:
    (folder / "program.py").write_text(program)
    path = os.pathsep.join(filter(None, [directory, str(ROOT / "src"), *words[2:]]))
    env = {**os.environ, "PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, "program.py", *words],
        cwd=folder, env=env, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    # the real one now and then aborts after its last line, when threads of gloo outlive the interpreter
    assert done.returncode == 0 or directory != str(DIRECTORY), done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("NUMBERS")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("NUMBERS"))


@pytest.mark.skipif(not peer(), reason="DeepSpeed itself is not installed")
@pytest.mark.parametrize(
    ("stage", "schedule"), [("1", "WarmupDecayLR"), ("2", "WarmupCosineLR"), ("3", "WarmupDecayLR")]
)
def test_losses_norms_and_learning_rates_are_deepspeed_s(stage, schedule, tmp_path):
    ours = numbers_with(str(DIRECTORY), tmp_path, stage, schedule)
    theirs = numbers_with(peer(), tmp_path, stage, schedule)
    assert len(ours) == 24 + 2 * 12
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)


@pytest.mark.skipif(not peer(), reason="DeepSpeed itself is not installed")
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_state_that_accelerate_saved_with_deepspeed_goes_on_by_name(stage, tmp_path):
    theirs = numbers_with(peer(), tmp_path, stage, "DeepSpeed", program=STATES)
    ours = numbers_with("", tmp_path, stage, "ZeroShard", program=STATES)
    assert len(ours) == 4
    assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.skipif(not peer(), reason="DeepSpeed itself is not installed")
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("fp32", ["lr"]),
        ("fp16", ["loss_scale", "lr"]),
        ("clipped fp16", ["loss_scale", "lr"]),
        ("pipeline", ["lr", "train_loss"]),
    ],
)
def test_what_its_monitors_write_ours_write_too(kind, names, tmp_path):
    """In fp16 the first steps overflow. A pipeline is the only engine of DeepSpeed that writes losses."""
    trackers = str(TRACKERS) if (TRACKERS / ".ready").exists() else ""
    ours, theirs = (
        numbers_with(folder, tmp_path, kind, str(tmp_path / name), trackers, program=MONITORED)
        for name, folder in (("ours", str(DIRECTORY)), ("theirs", peer()))
    )
    wanted = [f"csv Train_Samples_{name}" for name in names]
    wanted += [f"tensorboard Train/Samples/{name}" for name in names if trackers]
    assert sorted(theirs) == sorted(wanted)
    for name, points in theirs.items():
        assert [step for step, _ in points] == [8, 16, 24, 32, 40, 48, 56]
        assert [step for step, _ in ours[name]] == [step for step, _ in points]
        values = [value for _, value in points]
        assert [value for _, value in ours[name]] == pytest.approx(values, rel=1e-6), name
    if kind.endswith("fp16"):
        assert len({value for _, value in theirs["csv Train_Samples_loss_scale"]}) > 3
