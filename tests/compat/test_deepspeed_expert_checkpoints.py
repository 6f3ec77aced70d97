"""Checkpoints of the real DeepSpeed with experts are read bit for bit, and training goes on from them.

DeepSpeed runs in processes of its own, as for ``test_deepspeed_checkpoints.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed_expert_runs import (
    AT,
    CASES,
    MORE_STEPS,
    STEPS,
    TAG,
    Model,
    config,
    groups_of,
    tokens,
)
from deepspeed_site import KEYS, NEEDED, SITE
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.reader import full
from zeroshard.parallel import MoE
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

RANKS = 4

pytestmark = NEEDED


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with all cases."""
    out = tmp_path_factory.mktemp("runs")
    path = os.pathsep.join(filter(None, [SITE, os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    script = Path(__file__).with_name("deepspeed_expert_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), str(out), str(RANKS)],
        env=env, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def reference_of(folder, key):
    """What all ranks of the saved run had."""
    found = {}
    for rank in range(RANKS):
        found |= torch.load(folder / f"reference-{rank}.pt")[key]
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_real_checkpoint_is_read_bit_for_bit(runs, name):
    folder = runs / name
    saved = DeepSpeedReader(folder / TAG)
    for key in KEYS:
        expected = reference_of(folder, key)
        assert set(saved.parameters) == set(expected)
        for fqn, values in expected.items():
            assert torch.equal(full(saved, fqn, key), values.float()), (key, fqn)
    assert saved.left_behind == []
    assert len([fqn for fqn in saved.buffers(0) if AT in fqn]) == 8


def open_engine(case, ep_size, stage):
    keys = {**config(case), "zero_optimization": {"stage": stage}}
    keys["gradient_accumulation_steps"] = RANKS // dist.get_world_size()
    keys["use_data_before_expert_parallelism"] = case.far and ep_size > 1
    model = Model(MoE, ep_size)
    params = groups_of(model, case.groups)
    return zeroshard.initialize(model=model, model_parameters=params, config=keys)[0]


def goes_on(root, names, ep_size, stage):
    """By case: the losses after the checkpoint, and what differs from the saved run."""
    losses, wrong = {}, []
    for name in names:
        case = CASES[name]
        size = case.ep_size if ep_size is None else ep_size
        with open_engine(case, size, stage) as engine:
            engine.load_checkpoint(str(Path(root) / name))
            assert engine.global_steps == STEPS
            expected = {key: reference_of(Path(root) / name, key) for key in KEYS}
            for fqn, param in engine.module.named_parameters():
                values = {"value": safe_get_full_fp32_param(param)}
                for key in KEYS[1:]:
                    values[key] = safe_get_full_optimizer_state(param, key)
                wrong += [
                    (name, fqn, key)
                    for key in KEYS
                    if not torch.equal(values[key], expected[key][fqn].float())
                ]
            losses[name] = []
            for step in range(STEPS, STEPS + MORE_STEPS):
                total = torch.zeros(())
                for rank in range(engine.dp_rank, RANKS, engine.dp_size):
                    loss = engine(tokens(step, rank))
                    engine.backward(loss)
                    engine.step()
                    total += loss.detach().float()
                dist.all_reduce(total)
                losses[name].append(total.item() / RANKS)
            after = reference_of(Path(root) / name, "next")
            for fqn, param in engine.iter_full_params():
                near = 2e-5 if case.precision == "fp32" else 5e-2
                torch.testing.assert_close(param.float(), after[fqn].float(), rtol=0, atol=near)
    return losses, wrong


@pytest.mark.parametrize(
    ("ranks", "ep_size", "stage"), [(4, None, 1), (4, None, 3), (2, 2, 3), (2, 1, 2)]
)
def test_training_goes_on_as_deepspeed_would(runs, ranks, ep_size, stage):
    """On as many ranks or fewer, at any stage. Losses and parameters agree up to rounding."""
    names = [name for name in CASES if ep_size is None or not name.startswith("bf16")]
    rows = run_ranks(goes_on, ranks, str(runs), names, ep_size, stage, timeout=120)
    for losses, wrong in rows:
        assert wrong == []
        for name, after in losses.items():
            expected = torch.load(runs / name / "reference-0.pt")["next losses"]
            rel = 1e-5 if CASES[name].precision == "fp32" else 1e-2
            assert after == pytest.approx(expected, rel=rel), name
