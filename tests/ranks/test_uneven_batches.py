"""Ranks with different numbers of batches."""

from __future__ import annotations

import time

import pytest
import torch
from loops import CASE, STAGES, adamw, assert_close, loss_of, open_engine, trained, weights
from support.parity import make_batches
from torch.utils.data import DataLoader
from zeroshard_testing import on_ranks, run_ranks

from zeroshard.errors import DistributedError, UnevenBatches

TEXT = (
    "rank 2 has no batch 5 while ranks 0, 1, 3 do. Every rank must see the same number of batches: "
    'drop or pad the rest (a DistributedSampler does), or set "uneven": "join" to let the others '
    "finish."
)


def batches_of(engine, counts, seed=0):
    """The batches of this rank. Their number differs between ranks."""
    every = make_batches(CASE, steps=max(counts), world=len(counts), seed=seed)
    return [every[i][0][engine.global_rank] for i in range(counts[engine.global_rank])]


def fit(engine, counts):
    for batch in engine.batches(batches_of(engine, counts)):
        engine.backward(loss_of(engine, batch))
        engine.step()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_a_rank_that_runs_out_early_is_an_error_everywhere_at_once(stage):
    """Without this error the other ranks would wait for its collectives."""
    with open_engine(stage) as engine:
        begin_s = time.monotonic()
        with pytest.raises(UnevenBatches) as caught:
            fit(engine, (8, 8, 5, 8))
        assert str(caught.value) == TEXT
        assert engine.global_steps == 5
        assert time.monotonic() - begin_s < 5


@on_ranks(4)
def test_the_error_names_all_who_have_none():
    with open_engine(0) as engine, pytest.raises(UnevenBatches) as caught:
        fit(engine, (4, 4, 8, 4))
    who = "ranks 0, 1, 3 have no batch 4 while rank 2 does"
    assert str(caught.value) == TEXT.replace("rank 2 has no batch 5 while ranks 0, 1, 3 do", who)


def reference(counts, micros, optimizer=adamw):
    """Plain PyTorch: each step averages over the existing batches."""
    model = CASE.build()
    inner = optimizer(model.parameters())
    every = make_batches(CASE, steps=max(counts), world=len(counts))
    for begin in range(0, max(counts), micros):
        there = [
            every[i][0][rank]
            for i in range(begin, min(begin + micros, max(counts)))
            for rank, count in enumerate(counts)
            if i < count
        ]
        for batch in there:
            (loss_of(model, batch) / len(there)).backward()
        inner.step()
        inner.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize(("counts", "micros"), [((3, 5), 1), ((6, 3), 3), ((2, 6), 2)])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_join_equals_the_mean_over_the_batches_that_were_there(stage, counts, micros):
    with open_engine(stage, uneven="join", gradient_accumulation_steps=micros) as engine:
        fit(engine, counts)
        assert engine.global_steps == max(counts) // micros
        assert_close(weights(engine), reference(counts, micros), rtol=1e-5)


@on_ranks(4)
def test_join_with_four_ranks():
    counts = (4, 4, 8, 5)
    with open_engine(2, uneven="join") as engine:
        fit(engine, counts)
        assert_close(weights(engine), reference(counts, 1), rtol=1e-5)


@on_ranks(2)
def test_join_with_equal_counts_changes_no_bit():
    with open_engine(1, uneven="join") as engine:
        fit(engine, (3, 3))
        joined = weights(engine)
    with open_engine(1) as engine:
        fit(engine, (3, 3))
        assert all(torch.equal(joined[n], w) for n, w in weights(engine).items())


@on_ranks(2)
def test_a_second_epoch_starts_with_everybody():
    counts = (3, 1)
    with open_engine(3, uneven="join") as engine:
        fit(engine, counts)
        fit(engine, (2, 2))
        assert engine.global_steps == 5
        first = reference(counts, 1)
        assert not torch.equal(weights(engine)["out.bias"], first["out.bias"])
        assert engine._weight == 1.0


@on_ranks(2)
def test_join_needs_one_batch_on_every_rank():
    with open_engine(1, uneven="join") as engine, pytest.raises(UnevenBatches) as caught:
        fit(engine, (2, 0))
    assert str(caught.value) == (
        'rank 1 never had a batch. With "uneven": "join" a rank repeats an earlier batch while '
        "the others finish. Give every rank at least one."
    )


@on_ranks(2)
def test_no_batch_anywhere_is_an_empty_loop():
    with open_engine(1) as engine:
        fit(engine, (0, 0))
        assert engine.global_steps == 0


@on_ranks(2)
def test_leaving_the_loop_early_together_is_fine():
    with open_engine(1, uneven="join") as engine:
        for at, batch in enumerate(engine.batches(batches_of(engine, (4, 6)))):
            engine.backward(loss_of(engine, batch))
            engine.step()
            if at == 1:
                break
        fit(engine, (1, 1))
        assert engine.global_steps == 3


def goes_on_alone(stage):
    """A plain loader, which does not check whether other ranks have a batch. Rank 1 ends after two."""
    with open_engine(stage) as engine:
        loader = DataLoader(batches_of(engine, (4, 2)), batch_size=None)
        for batch in loader:
            engine.backward(loss_of(engine, batch))
            engine.step()
    return engine.global_steps


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_loader_that_ends_early_ends_the_run_in_seconds(stage):
    begin_s = time.monotonic()
    alone, left = run_ranks(goes_on_alone, 2, stage, keep_exceptions=True, timeout=40)
    assert time.monotonic() - begin_s < 20
    assert left == 2
    assert isinstance(alone, DistributedError)
    assert "rank 1" in str(alone)


def evaluates_alone(stage):
    """The same, but rank 1 then calls something else that needs the other ranks."""
    with open_engine(stage) as engine:
        for batch in batches_of(engine, (4, 2)):
            engine.backward(loss_of(engine, batch))
            engine.step()
        engine.memory_report(all_ranks=True)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_that_goes_on_to_evaluate_is_told_on_both_sides(stage, monkeypatch):
    monkeypatch.setenv("ZEROSHARD_STALL_S", "0.4")  # seconds between checks; the ranks inherit it
    results = run_ranks(evaluates_alone, 2, stage, keep_exceptions=True, timeout=40)
    assert [isinstance(result, DistributedError) for result in results] == [True, True]


def test_one_rank_needs_no_agreement():
    with open_engine(2) as engine:
        fit(engine, (3,))
        assert_close(weights(engine), trained(2), rtol=0)
