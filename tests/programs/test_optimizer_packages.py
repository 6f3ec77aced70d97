"""Optimizers that packages publish train under every stage as in plain PyTorch, or are refused.

``make test-programs`` installs the packages. A row whose package is not installed is skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.edge_case_models import BATCH, CASES
from support.parity import engine_run, make_batches, reference_run

import zeroshard
from zeroshard.errors import UnsupportedError
from zeroshard.testing import on_ranks

CASE = CASES["mlp"]
STEPS = 4
PLACES = [
    *((stage, "") for stage in range(4)),
    *((stage, where) for stage in (1, 3) for where in ("cpu", "nvme")),
]
TRAINED = {
    "schedulefree": "AdamWScheduleFree SGDScheduleFree RAdamScheduleFree AdamWScheduleFreePaper",
    "lion_pytorch": "Lion",
    "pytorch_optimizer": "ADOPT AdEMAMix AdaBelief AdaBound AdaMax AdaMod AdaPNM AdamS Adan "
    "Ano AccSGD DiffGrad DualAdam EXAdam Grams Kate LaProp MADGRAD PID PNM QHAdam QHM SGDW "
    "ScheduleFreeAdamW ScheduleFreeRAdam ScheduleFreeSGD VSGD",
}
REFUSED = {
    "schedulefree": "AdamWScheduleFreeClosure",
    "prodigyopt": "Prodigy",
    "pytorch_optimizer": "AdamP CAME DAdaptAdam Lamb SWATS ScalableShampoo",
}


def rows(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(package, name) for package, names in table.items() for name in names.split()]


def maker(package: str, name: str) -> Any:
    """Makes the optimizer from named parameters; a schedule-free one is in its mode for training."""
    cls = getattr(pytest.importorskip(package), name)

    def make(named: Any) -> torch.optim.Optimizer:
        optimizer: Any = cls([param for _, param in named], lr=1e-3)
        if hasattr(optimizer, "train"):
            optimizer.train()
        return optimizer

    return make


def offload(where: str, folder: Path, stage: int) -> dict[str, Any]:
    if not where:
        return {}
    place = {"device": where} | ({"nvme_path": str(folder)} if where == "nvme" else {})
    params = {"offload_param": place} if stage == 3 and where == "nvme" else {}
    return {"zero_optimization": {"offload_optimizer": place, **params}}


def compare(make: Any, world: int, folder: Path, most: float) -> None:
    batches = make_batches(CASE, steps=STEPS, world=world)
    wanted = reference_run(CASE, make, batches, precision="fp64").params
    for stage, where in PLACES:
        config = offload(where, folder, stage)
        run = engine_run(CASE, make, batches, stage=stage, precision="fp64", config=config)
        for name, value in wanted.items():
            error = (run.params[name] - value).abs().max().item()
            assert error <= most, (stage, where, name, error)


@pytest.mark.parametrize(("package", "name"), rows(TRAINED))
def test_an_element_wise_optimizer_gives_the_bits_of_plain_pytorch(package, name, tmp_path):
    compare(maker(package, name), 1, tmp_path, 0.0)


@pytest.mark.parametrize("package", TRAINED)
@on_ranks(2)
def test_element_wise_optimizers_train_on_two_ranks_as_in_plain_pytorch(package, tmp_path):
    for name in TRAINED[package].split():
        compare(maker(package, name), 2, tmp_path, 1e-12)


def losses(engine: Any, batches: Any) -> list[float]:
    found = []
    for micros in batches:
        loss = CASE.loss(engine, micros[0][0])
        engine.backward(loss)
        engine.step()
        found.append(float(loss))
    return found


@pytest.mark.parametrize(("package", "name"), rows(TRAINED))
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(package, name, tmp_path):
    make, batches = maker(package, name), make_batches(CASE, steps=STEPS, world=1)
    config = {"train_micro_batch_size_per_gpu": BATCH, "unit_min_numel": 1}
    for stage, where in [(1, ""), (3, "nvme")]:
        keys = offload(where, tmp_path, stage).get("zero_optimization", {})
        runs = []
        for loads in (False, True):
            model = CASE.build()
            with zeroshard.Engine(
                model,
                config={**config, "zero_optimization": {"stage": stage, **keys}},
                optimizer=make(list(model.named_parameters())),
            ) as engine:
                if loads:
                    engine.load_checkpoint(str(tmp_path / f"saved{stage}"))
                else:
                    losses(engine, batches[:2])
                    engine.save_checkpoint(str(tmp_path / f"saved{stage}"))
                runs.append(losses(engine, batches[2:]))
        assert runs[0] == runs[1], (stage, where)


@pytest.mark.parametrize(("package", "name"), rows(REFUSED))
def test_other_optimizers_are_refused_before_the_first_step(package, name):
    cls = getattr(pytest.importorskip(package), name)
    model = CASE.build()
    with pytest.raises(
        UnsupportedError, match=f"{name} cannot run on sharded parameters: .*{name}"
    ):
        zeroshard.Engine(
            model,
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
            optimizer=cls(model.parameters()),
        )
