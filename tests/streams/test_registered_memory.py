"""Gathers and reductions in memory that NCCL knows, and in plain memory where that is not possible."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from scenarios import Run, Scenario, cuda, in_child, prepare
from stepwise import report
from zeroshard_testing import on_ranks
from zeroshard_testing.streams.nccl import PretendedNCCL

from zeroshard import Engine
from zeroshard.comm import process_group
from zeroshard.comm.process_group import ProcessGroupComm

RANKS = 4
BLOCKS = {"block_max_numel": 2000, "unit_max_numel": 600}


def trained_on(stage: int, *, steps: int = 2, **keys):
    """The line about memory, the counts of the last step, the losses and the findings. A tuple, and how
    many pools are registered after the engine is closed."""
    with cuda(RANKS) as watch:
        run = Run(Scenario(stage, "none", "whole_blocks", RANKS), "cuda", watch)
        trained = run.open(**keys)
        backends = [comm.backend for comm in trained._watch.comms_of_units]
        for step in range(steps):
            run.phase(f"step {step}")
            run.step(trained)
        counts = watch.counts(f"step {steps - 1}")
        line, losses = trained._watch.memory_line, [float(loss) for loss in run.losses]
        trained.close()
        left = sum(len(backend.pools) for backend in backends)
        return line, dict(counts.registered), dict(counts.unregistered), losses, report(watch), left


def both(stage: int, sizes):
    return trained_on(stage, registered_memory=True, **sizes), trained_on(stage, **sizes)


@pytest.mark.parametrize(("stage", "sizes"), [(3, {}), (3, BLOCKS), (2, {})])
@on_ranks(1, group=False)
def test_all_that_is_gathered_is_in_registered_memory_and_no_bit_changes(stage, sizes):
    prepare()
    (line, known, other, losses, found, left), plain = in_child(lambda: both(stage, sizes))
    communicators = 2 if stage == 3 else 1
    assert line == f"registered memory: {communicators} communicators of {communicators}"
    assert known["all-gather"]
    # Of a step: the norms, which are small. A gradient that is adopted is in autograd's memory.
    assert other["all-gather"] <= 64 * RANKS * 8
    assert known["reduce-scatter"]
    assert losses == plain[3]
    assert not plain[1]
    assert not found
    assert not left


def with_segments_that_grow():
    return mock.patch.dict(os.environ, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def without_the_call():
    class Older(PretendedNCCL):
        def __getattribute__(self, name):
            if name == "register_mem_pool":
                raise AttributeError(name)
            return super().__getattribute__(name)

    return mock.patch("zeroshard_testing.streams.nccl.PretendedNCCL", Older)


def with_an_old_nccl():
    error = RuntimeError("NCCL error: invalid usage, ncclCommRegister\nmore")
    return mock.patch.object(PretendedNCCL, "register_mem_pool", side_effect=error)


def impossible_elsewhere():
    usual = ProcessGroupComm.all_gather_small

    def answered(comm, vector_K, *, name):
        rows = usual(comm, vector_K, name=name)
        if name == process_group.NAME:
            rows[2] = 0
        return rows

    return mock.patch.object(ProcessGroupComm, "all_gather_small", answered)


REASONS = {
    with_segments_that_grow: "expandable_segments. Set PYTORCH_ALLOC_CONF=expandable_segments:False",
    without_the_call: "this build of torch has no register_mem_pool for nccl",
    with_an_old_nccl: "NCCL error: invalid usage, ncclCommRegister",
    impossible_elsewhere: "it is not possible on rank 2",
}


def fallen_back(way):
    with way():
        return trained_on(3, registered_memory=True), trained_on(3)


@pytest.mark.parametrize("way", REASONS)
@on_ranks(1, group=False)
def test_where_it_is_not_possible_memory_is_plain_and_the_line_says_why(way):
    prepare()
    (line, known, _, losses, found, left), plain = in_child(lambda: fallen_back(way))
    assert line.startswith("registered memory: 0 communicators of 2; plain memory: ")
    assert REASONS[way] in line
    assert not known
    assert losses == plain[3]
    assert not found
    assert not left


def aborted() -> tuple[str, list[bool]]:
    """The findings after an abort and the end of the engine, and whether memory was registered."""
    with cuda(RANKS) as watch:
        run = Run(Scenario(3, "none", "plain", RANKS), "cuda", watch)
        trained = run.open(registered_memory=True)
        run.step(trained)
        comms = trained._watch.comms_of_units
        was_registered = [bool(comm.backend.pools) for comm in comms]
        for comm in comms:
            comm.abort()
        trained.close()
        return report(watch), was_registered


@on_ranks(1, group=False)
def test_after_an_abort_no_registration_is_ended():
    prepare()
    found, was_registered = in_child(aborted)
    assert was_registered == [True, True]
    assert not found


@on_ranks(2)
def test_cpu_ranks_send_from_any_memory():
    config = {
        "train_batch_size": 2,
        "registered_memory": True,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3},
    }
    with Engine(torch.nn.Linear(8, 8), config=config) as engine:
        line = engine._watch.memory_line
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
    assert line == (
        "registered memory: 0 communicators of 1; plain memory: the transport shm sends from any memory"
    )
