"""The data loader that ``initialize`` returns continues where another run, on other ranks, stopped."""

from __future__ import annotations

import itertools

import pytest
import torch
from loops import CASE, adamw, config_for
from torch.utils.data import TensorDataset
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
