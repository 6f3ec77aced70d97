"""Public calls of PyTorch around a step have their PyTorch effect, or raise an error that helps."""

from __future__ import annotations

import os
import re

import api_functions
import api_modules
import api_optimizers
import api_outputs
import api_parameters
import pytest
from api_not_yet import NOT_YET
from api_rows import STAGES, cases, judge, judge_sequence, sequences
from zeroshard_testing.ranks import run_ranks


def verdicts(rows: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Of rows at stages. Collective."""
    return {(name, stage): judge(name, stage) for name, stage in rows}


PARTS = [api_functions, api_modules, api_optimizers, api_outputs, api_parameters]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_is_plain_pytorch_or_an_error(ranks, part):
    rows = cases(ranks, part.__name__)
    found = run_ranks(verdicts, ranks, rows, timeout=170)
    wrong: dict[tuple[str, str], list[int]] = {}
    for name, stage in rows:
        if problem := _problem(name, (stage, ranks), [one[name, stage] for one in found]):
            wrong.setdefault((name, problem), []).append(stage)
    lines = [f"{name}, stages {stages}: {problem}" for (name, problem), stages in wrong.items()]
    assert not lines, "\n".join([f"{len(wrong)} rows on {ranks} ranks:", *lines])


def verdicts_of_sequences(rows: list[list[str]], stage: int) -> list[str]:
    return [judge_sequence(names, stage) for names in rows]


@pytest.mark.parametrize("stage", STAGES)
def test_rows_that_follow_each_other_are_plain_pytorch(stage):
    count = 60 if os.environ.get("ZEROSHARD_TEST_ALL") == "1" else 12
    rows = sequences(stage, count, stage)
    found = run_ranks(verdicts_of_sequences, 2, rows, stage, timeout=170)
    wrong = [(names, seen) for names, *seen in zip(rows, *found, strict=True) if any(seen)]
    assert not wrong


def _problem(name: str, where: tuple[int, int], seen_by_rank: list[str]) -> str:
    """What is wrong with a row at (stage, ranks). A known fault that is gone is wrong too."""
    seen = next(filter(None, seen_by_rank), "")
    fault = NOT_YET.get(name)
    if fault is None or where[0] not in fault.stages or where[1] not in fault.ranks:
        return seen
    return "" if re.search(fault.seen, seen) else f"not the known {fault.seen!r}, but {seen!r}"
