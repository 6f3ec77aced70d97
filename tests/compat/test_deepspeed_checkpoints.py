"""Checkpoints of the real DeepSpeed are read bit for bit, and training continues from them.

DeepSpeed runs in separate processes. They use the DeepSpeed of this interpreter, or the one in the folder
that ``ZEROSHARD_TEST_DEEPSPEED`` names.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from deepspeed_runs import CASES, MORE_STEPS, STEPS, TAG, Model, config, parameter_groups, tokens
from deepspeed_site import KEYS, NEEDED, SITE
from zeroshard_testing import run_ranks

import zeroshard
from zeroshard.checkpoint.deepspeed.files import is_deepspeed
from zeroshard.checkpoint.deepspeed.reader import DeepSpeedReader
from zeroshard.checkpoint.reader import full
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

pytestmark = NEEDED


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For each number of ranks a folder with all cases, made on first use."""
    made: dict[int, Path] = {}

    def folder(ranks: int) -> Path:
        if ranks not in made:
            out = made[ranks] = tmp_path_factory.mktemp(f"runs-of-{ranks}")
            path = os.pathsep.join(filter(None, [SITE, os.environ.get("PYTHONPATH", "")]))
            env = {
                **os.environ,
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": path,
            }
            script = Path(__file__).with_name("deepspeed_runs.py")
            done = subprocess.run(
                [sys.executable, str(script), str(out), str(ranks)],
                env=env, capture_output=True, text=True, timeout=170,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr[-4000:]
        return made[ranks]

    return folder


def of(runs, ranks, name):
    folder = runs(ranks) / name
    return folder, torch.load(folder / "reference.pt")


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_real_checkpoint_is_read_bit_for_bit(runs, ranks, name):
    folder, reference = of(runs, ranks, name)
    case = CASES[name]
    assert is_deepspeed(folder / TAG)
    saved = DeepSpeedReader(folder / TAG)
    trained = {fqn for fqn, parameter in saved.parameters.items() if parameter.trained}
    assert trained == set(reference["value"])
    for key in KEYS:
        for fqn, expected in reference[key].items():
            assert torch.equal(full(saved, fqn, key), expected), (key, fqn)
    for fqn, expected in reference.get("zero_to_fp32", {}).items():
        if fqn in saved.parameters:
            assert torch.equal(full(saved, fqn).float(), expected.float()), fqn
    names = {n for fqn, p in saved.parameters.items() for n in (fqn, *p.aliases)}
    assert names | saved.buffers(0).keys() == Model(case.model).state_dict().keys()
    for fqn, buffer in saved.buffers(0).items():
        assert torch.equal(buffer, reference["buffers"][fqn]), fqn
    assert saved.left_behind == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_what_is_beside_the_parameters_comes_back(runs, ranks, name):
    folder, reference = of(runs, ranks, name)
    found = DeepSpeedReader(folder / TAG).shared()
    assert found["counters"] == reference["counters"]
    assert found["scheduler"] == {"last_batch_iteration": STEPS - 1}
    assert found["client_state"]["epoch"] == 2
    assert found["client_state"]["best"]["loss"] == 0.5
    assert torch.equal(found["client_state"]["best"]["at"], torch.arange(3))
    assert len(found["client_state"]) == 2
    assert len(found["groups"]) == CASES[name].groups
    if not name.startswith("elastic"):
        assert [row["lr"] for row in found["groups"]] == reference["lr"]
    assert ("scaler" in found) == name.startswith("fp16")
    if "scaler" in found:
        assert found["scaler"]["scale"] == reference["scale"]
        assert found["scaler"]["step"] == STEPS


# ---------------------------------------------------------------------- going on


def open_engine(name):
    case = CASES[name]
    torch.manual_seed(1)
    model = Model(case.model)
    keys = config(case)
    keys["zero_optimization"] = {"stage": case.stage}
    keys.pop("data_types", None)
    engine, *_ = zeroshard.initialize(
        model=model,
        optimizer=torch.optim.AdamW(parameter_groups(model, case.groups), lr=0.5),
        config=keys,
    )
    return engine


def losses(engine, begin, end):
    """The losses of the whole batch, one for each step."""
    found = []
    for step in range(begin, end):
        loss = engine(tokens(step, engine.global_rank))
        engine.backward(loss)
        engine.step()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        found.append(total.item() / engine.world_size)
    return found


def goes_on(root):
    """By case, the losses after the checkpoint."""
    found = {}
    for name in CASES:
        with open_engine(name) as engine:
            path, client_state = engine.load_checkpoint(str(Path(root) / name))
            assert path.endswith(TAG)
            assert client_state["epoch"] == 2
            assert engine.global_steps == STEPS
            found[name] = losses(engine, STEPS, STEPS + MORE_STEPS)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_training_goes_on_as_deepspeed_would(runs, ranks):
    """Gradients are summed in another order and in low precision. Losses agree up to its rounding."""
    found = run_ranks(goes_on, ranks, str(runs(ranks)), timeout=120)[0]
    for name, after in found.items():
        _, reference = of(runs, ranks, name)
        rel = 1e-5 if name.startswith("fp32") else 1e-2
        assert after == pytest.approx(reference["next losses"], rel=rel), name


def holds(root):
    """What differs from the saved run, on other ranks and at all stages."""
    wrong = []
    for name in CASES:
        expected = torch.load(Path(root) / name / "reference.pt")
        with open_engine(name) as engine:
            engine.load_checkpoint(str(Path(root) / name))
            for fqn, param in engine.module.named_parameters():
                if not param.requires_grad:
                    continue
                values = {"value": safe_get_full_fp32_param(param)}
                for key in ("exp_avg", "exp_avg_sq"):
                    values[key] = safe_get_full_optimizer_state(param, key)
                wrong += [
                    (name, fqn, key)
                    for key in KEYS
                    if not torch.equal(values[key], expected[key][fqn])
                ]
            for fqn, buffer in engine.module.named_buffers():
                if engine.global_rank == 0 and not torch.equal(
                    buffer, expected["buffers"][fqn].to(buffer.dtype)
                ):
                    wrong.append((name, fqn))
    return wrong


def test_other_ranks_hold_the_same_masters_and_moments(runs):
    for wrong in run_ranks(holds, 2, str(runs(3)), timeout=120):
        assert wrong == []
