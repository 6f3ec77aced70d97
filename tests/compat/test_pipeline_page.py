"""The programs in ``docs/pipeline.md`` run, on two pipeline ranks and on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zeroshard_testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
STAGES = ('"pipeline": 2', "num_stages=2", "num_stages=2")
"""What says in each program how many pipeline ranks there are."""


def run(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("program", range(len(STAGES)))
def test_the_programs_of_the_page_run(program, ranks):
    found = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(found) == len(STAGES)
    code, stages = found[program], STAGES[program]
    assert code.count(stages) == 1
    run_ranks(run, ranks, code.replace(stages, stages.replace("2", str(ranks))))
