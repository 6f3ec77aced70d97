"""The data loader that ``initialize`` returns continues where another run, on other ranks, stopped."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
import torch.distributed as dist
from loops import CASE, adamw, config_for
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from zeroshard_testing.ranks import run_ranks

import zeroshard


def read(state, count):
    """Read ``count`` batches or the rest of the epoch on this rank. Returns them and the position
    after them."""
    engine, _, loader, _ = zeroshard.initialize(
        model=CASE.build(),
        optimizer=adamw,
        training_data=TensorDataset(torch.arange(40)),
        config=config_for(),
    )
    with engine:
        if state is not None:
            loader.load_state_dict(state)
        loader.sampler.set_epoch(2)
        batches = [batch.tolist() for (batch,) in itertools.islice(loader, count)]
        return batches, loader.state_dict()


@pytest.mark.parametrize("others", [1, 2, 3])
def test_data_goes_on_on_another_number_of_ranks(others):
    first, states = zip(*run_ranks(read, 2, None, 3), strict=True)
    assert states[0] == states[1]
    rest, _ = zip(*run_ranks(read, others, states[0], None), strict=True)
    seen = [x for batches in (*first, *rest) for batch in batches for x in batch]
    assert set(seen) == set(range(40))
    assert len(seen) < 40 + others


class Rows(Dataset):
    """Sample ``i`` is ``i`` in three numbers, and ``i``."""

    def __len__(self):
        return 22

    def __getitem__(self, at):
        return torch.full((3,), float(at)), at


def train_rows(folder, count, kind):
    """Train on ``count`` micro-batches, after a resume if there is a checkpoint, and save.

    Returns the samples, the warnings, the parameters and the number of steps.
    """
    logs = Logs()
    torch.manual_seed(0)
    data = Streamed() if kind == "stream" else Rows()
    engine, _, loader, _ = zeroshard.initialize(
        model=torch.nn.Linear(3, 1),
        training_data=data,
        config={
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        },
    )  # fmt: skip
    with engine, logs:
        path, _ = engine.load_checkpoint(folder, missing_ok=True)
        assert (path is None) == (not (folder / "latest").exists())
        seen = []
        for x, number in itertools.islice(loader, count):
            engine.backward(engine(x).mean())
            engine.step()
            seen += number.tolist()
        engine.save_checkpoint(folder)
        assert engine.micro_steps % 4 == len(seen) % 4
        found = [value.clone() for _, value in engine.iter_full_params()]
    return seen, logs.texts, found, engine.global_steps


class Streamed(IterableDataset):
    """The same samples, from a dataset that chooses by itself what a rank reads."""

    def __iter__(self):
        return iter([Rows()[at] for at in range(dist.get_rank(), 22, dist.get_world_size())])


class Logs(logging.Handler):
    """Collects the texts of records inside a ``with`` block."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("zeroshard").addHandler(self)

    def __exit__(self, *_):
        logging.getLogger("zeroshard").removeHandler(self)


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_a_run_saved_inside_a_step_goes_on_where_that_step_began(tmp_path, kind):
    """Each of two ranks has 11 micro-batches: two steps of four, and three."""
    runs = [run_ranks(train_rows, 2, tmp_path / "cut", count, kind) for count in (6, None)]
    whole = run_ranks(train_rows, 2, tmp_path / "whole", 8, kind)
    for rank, ((first, told, _, _), (rest, left_over, found, steps)) in enumerate(
        zip(*runs, strict=True)
    ):
        assert first[:4] + rest[:4] == whole[rank][0]
        assert sorted(first[:4] + rest) == sorted({*first, *rest})
        assert len(first[:4] + rest) == 11
        assert steps == 2
        assert all(map(torch.equal, found, whole[rank][2]))
        if rank == 0:
            (text,) = [text for text in told if "middle of a step" in text]
            assert "with 2 of 4 micro-batches done" in text
            assert "reads them again" in text
            (text,) = [text for text in left_over if "middle of a step" in text]
            assert "with 3 of 4 micro-batches done" in text
            assert "left over at the end of the data" in text
