"""A run that resumes equals the run without interruption, for any number of ranks, stage and tier."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoint_model import Small, differences, everything, open_engine, stores, train
from support.covering import covering
from zeroshard_testing import on_ranks, run_ranks

STAGES = (0, 1, 2, 3)


@pytest.mark.parametrize(
    "precision", ["fp32", pytest.param("bf16", marks=pytest.mark.smoke), "fp16"]
)
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_ten_steps_are_five_and_five_bit_for_bit(tmp_path, stage, precision):
    with open_engine(stage, precision, model=Small(dropout=0.2)) as engine:
        torch.manual_seed(engine.global_rank)
        train(engine, 5)
        engine.save_checkpoint(tmp_path)
        losses = train(engine, 5)
        expected = everything(engine)
    with open_engine(stage, precision, model=Small(dropout=0.2)) as engine:
        torch.manual_seed(99)
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 5
        assert train(engine, 5) == losses
        assert differences(everything(engine), expected) == []


def saves(root: str, stage: int, zero: dict) -> None:
    """Three steps, a checkpoint, and the state that it should restore."""
    with open_engine(stage, zero=zero) as engine:
        train(engine, 3)
        engine.save_checkpoint(root)
        expected = everything(engine)
        if engine.global_rank == 0:
            torch.save(expected, Path(root) / "expected.pt")


def loads(roots: list[str], stage: int, zero: dict) -> list[float]:
    """Load every checkpoint in turn into one engine. Returns the largest difference of a next loss."""
    worst = []
    with open_engine(stage, zero=zero) as engine:
        for root in roots:
            expected = torch.load(Path(root) / "expected.pt")
            engine.load_checkpoint(root)
            assert differences(everything(engine), expected) == [], root
            got = torch.tensor(train(engine, 1)[0], dtype=torch.float64)
            if engine.dp_size > 1:
                torch.distributed.all_reduce(got)
            whole = torch.load(Path(root) / "mean.pt")
            worst.append(abs(got.item() / engine.dp_size - whole))
    return worst


def mean_loss(root: str) -> None:
    """The next loss of the saved run over the whole batch, by plain modules on one rank."""
    from checkpoint_model import SAMPLES, global_batch, loss_of

    with open_engine(0) as engine:
        engine.load_checkpoint(root)
        loss = loss_of(engine, global_batch(engine.global_steps)[:SAMPLES])
        torch.save(loss.item(), Path(root) / "mean.pt")


KINDS = [
    *itertools.product((1, 2), STAGES, ["device"]),
    *itertools.product((3, 4), (1, 3), ["device"]),
    (2, 2, "optimizer on host"),
    (3, 1, "optimizer on disk"),
    (2, 3, "optimizer on disk"),
    (2, 3, "all on disk"),
    (3, 3, "all on disk"),
]


LOADED: dict[tuple, list[tuple]] = {}
"""What each kind loads: every number of ranks, stage and store after every other one."""
for row in covering([(*new, *old) for new in KINDS for old in KINDS]):
    LOADED.setdefault(row[:3], []).append(row[3:])


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[tuple, str]:
    """One checkpoint of each kind."""
    found = {}
    for kind in KINDS:
        world_size, stage, store = kind
        root = tmp_path_factory.mktemp("saved")
        run_ranks(saves, world_size, str(root), stage, stores(root / "swap")[store])
        run_ranks(mean_loss, 1, str(root))
        found[kind] = str(root)
    return found


@pytest.mark.parametrize("kind", LOADED, ids=str)
def test_every_kind_loads_what_any_other_saved(saved, tmp_path, kind):
    world_size, stage, store = kind
    zero = stores(tmp_path / "swap")[store]
    roots = [saved[old] for old in LOADED[kind]]
    for worst in run_ranks(loads, world_size, roots, stage, zero, timeout=200):
        assert max(worst) < 2e-6  # fp32 rounding: the batch is cut elsewhere, the states are equal
