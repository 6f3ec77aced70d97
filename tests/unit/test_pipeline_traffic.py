"""What ``auto`` chooses for a pipeline, from the facts of all ranks."""

from __future__ import annotations

import doctest
from dataclasses import replace

import pytest

from zeroshard.engine import pipeline_traffic
from zeroshard.engine.pipeline_traffic import PipelineTraffic, RankMemory, choose_traffic

GIB = 1 << 30
RANK = RankMemory(
    place=0,
    free_nbytes=100 * GIB,
    needed_nbytes=10 * GIB,
    gathered_nbytes=4 * GIB,
    summed_nbytes=8 * GIB,
    gathered_numel=2 * GIB,
    reduced_numel=2 * GIB,
)


def chosen(
    *ranks: RankMemory,
    gather: str = "auto",
    reduce: str = "auto",
    count: int = 4,
    limit: int | None,
) -> tuple[str, str]:
    found = choose_traffic(gather, reduce, ranks, micro_batches=count, limit_nbytes=limit)
    assert found.reason
    return found.gather, found.reduce


def test_docstring_is_right():
    found = doctest.testmod(pipeline_traffic)
    assert found.attempted and not found.failed


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (12 * GIB, ("step", "step")),
        (12 * GIB - 1, ("step", "micro_batch")),  # a gather saves 7 times Psi, a reduction 3 times
        (4 * GIB, ("step", "micro_batch")),
        (4 * GIB - 1, ("micro_batch", "micro_batch")),
        (0, ("micro_batch", "micro_batch")),
    ],
)
def test_what_moves_least_below_the_limit_is_chosen(limit, expected):
    assert chosen(RANK, limit=limit) == expected


def test_sums_are_held_where_the_parameters_do_not_fit():
    large = replace(RANK, gathered_nbytes=9 * GIB)
    assert chosen(large, limit=8 * GIB) == ("micro_batch", "step")


def test_half_of_the_memory_that_ranks_share_stays_free():
    """Each needs 10 and would hold 12 more; two of them on a host have 50 together."""
    assert chosen(RANK, replace(RANK, place=1), limit=None) == ("step", "step")
    assert chosen(RANK, RANK, limit=None) == ("step", "step")
    assert chosen(RANK, RANK, RANK, limit=None) == ("step", "micro_batch")
    assert chosen(*[RANK] * 4, limit=None) == ("micro_batch", "micro_batch")


def test_the_rank_with_the_least_memory_decides_for_all():
    small = replace(RANK, place=1, free_nbytes=30 * GIB)
    for ranks in ((RANK, small), (small, RANK)):
        assert chosen(*ranks, limit=None) == ("step", "micro_batch")
    assert chosen(RANK, replace(small, free_nbytes=0), limit=None) == ("micro_batch",) * 2


def test_memory_is_not_spent_where_nothing_is_saved():
    """One micro-batch is reduced once in any case. Stages 0 and 1 of ZeRO hold and move the same."""
    assert chosen(RANK, count=1, limit=99 * GIB) == ("step", "micro_batch")
    plain = replace(RANK, gathered_nbytes=0, summed_nbytes=0, gathered_numel=0, reduced_numel=0)
    found = choose_traffic("auto", "auto", [plain], micro_batches=4, limit_nbytes=0)
    assert "0.0 GiB more per rank" in found.reason


def test_what_the_program_named_stays():
    assert chosen(RANK, gather="micro_batch", limit=99 * GIB) == ("micro_batch", "step")
    assert chosen(RANK, reduce="step", limit=0) == ("micro_batch", "step")
    found = choose_traffic("step", "step", [RANK], micro_batches=4, limit_nbytes=0)
    assert found == PipelineTraffic("step", "step")


def test_the_reason_gives_the_numbers():
    found = choose_traffic("auto", "step", [RANK], micro_batches=4, limit_nbytes=12 * GIB)
    assert found.reason == (
        'auto chose gather "step" for the pipeline: it holds up to 12.0 GiB more per rank than '
        '"micro_batch", where "step" for both holds 12.0 GiB; auto_limit_nbytes is 12.0 GiB.'
    )
    found = choose_traffic("auto", "auto", [RANK], micro_batches=4, limit_nbytes=None)
    assert "at least 100.0 GiB were free, 50% of which stay free" in found.reason
