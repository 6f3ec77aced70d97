"""The lists of actions of pipeline schedules, their arithmetic, and what torch's schedules do."""

from __future__ import annotations

import doctest
from itertools import product
from types import SimpleNamespace

import pytest
from support.pipeline_models import bubble
from torch.distributed.pipelining import schedules as of_torch

from zeroshard.parallel import pipeline_stage, schedules
from zeroshard.parallel.schedules import SCHEDULES, Action, idle, live, stages_of

SIZES = [
    (name, ranks, per_rank, count)
    for name, ranks, per_rank, count in product(
        SCHEDULES, (1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 4, 8, 12, 16)
    )
    if not SCHEDULES[name].refusal(ranks, per_rank, count)
]


def test_docstrings_are_right():
    for module in (schedules, pipeline_stage):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stage_runs_every_micro_batch_once_in_both_directions(name):
    for _, ranks, per_rank, count in (size for size in SIZES if size[0] == name):
        lists = SCHEDULES[name].actions(ranks, per_rank, count)
        for rank, actions in enumerate(lists):
            assert sorted(actions) == [
                Action(kind, stage, m)
                for kind in "BF"
                for stage in stages_of(rank, ranks, per_rank)
                for m in range(count)
            ]
        idle(lists, ranks * per_rank)  # raises if the ranks wait for each other without end


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_wait_as_long_as_the_formula_says(name):
    for _, ranks, per_rank, count in (size for size in SIZES if size[0] == name):
        if count >= ranks and (name != "Interleaved1F1B" or count % ranks == 0):
            waits = idle(SCHEDULES[name].actions(ranks, per_rank, count), ranks * per_rank)
            assert waits == pytest.approx(bubble(ranks, per_rank, count), abs=1e-12)


def test_activations_that_a_rank_keeps():
    for name, ranks, per_rank, count in SIZES:
        kept = [live(actions) for actions in SCHEDULES[name].actions(ranks, per_rank, count)]
        if name == "1F1B":
            assert kept == [min(count, ranks - rank) for rank in range(ranks)]
        elif name != "Interleaved1F1B":
            assert kept == [per_rank * count] * ranks
        else:
            assert max(kept) <= per_rank * count


def test_lists_that_block_each_other_are_found():
    with pytest.raises(ValueError, match="without end"):
        idle([[Action("B", 0, 0), Action("F", 0, 0)]], 1)


def of_torch_class(name: str, ranks: int, per_rank: int, count: int, rank: int) -> list[Action]:
    kind = getattr(of_torch, pipeline_stage.CLASSES[name])
    stub = SimpleNamespace(
        _stages=[None] * per_rank,
        _num_stages=ranks,
        pp_group_size=ranks,
        _n_microbatches=count,
        n_local_stages=per_rank,
        rank=rank,
    )
    stub.number_of_rounds = max(1, count // ranks)
    stub.microbatches_per_round = count // stub.number_of_rounds
    if name in ("GPipe", "1F1B"):
        found = kind._get_pipeline_order(stub)[rank]
    else:
        found = kind._calculate_single_rank_operations(stub, rank)
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    return [
        Action(kinds[a.computation_type.name], a.stage_index, a.microbatch_index)
        for a in found
        if a is not None and a.computation_type.name in kinds
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_lists_are_those_of_torch(name):
    checked = 0
    for _, ranks, per_rank, count in (size for size in SIZES if size[0] == name):
        for rank, own in enumerate(SCHEDULES[name].actions(ranks, per_rank, count)):
            if name == "1F1B" and rank == ranks - 1:
                continue  # torch's list, not its step: see the next test
            assert of_torch_class(name, ranks, per_rank, count, rank) == own, (
                ranks,
                per_rank,
                count,
            )
            checked += 1
    assert checked > 20


def test_torchs_list_of_1f1b_is_still_wrong_for_the_last_stage():
    """A canary: its step is right. If this fails, the last rank can be compared too."""
    found = of_torch_class("1F1B", 2, 1, 4, rank=1)
    assert [a.micro_batch for a in found if a.kind == "F"] == [1, 2, 3, 4]


def test_torch_has_every_name_that_is_used():
    assert pipeline_stage.missing_names() == []
    assert set(pipeline_stage.CLASSES) == set(SCHEDULES)
