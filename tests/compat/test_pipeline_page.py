"""The program in ``docs/pipeline.md`` runs, on two pipeline ranks and on one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zeroshard.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def run(code: str) -> None:
    exec(compile(code, str(PAGE), "exec"), {})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_program_of_the_page_runs(ranks):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count('"pipeline": 2') == 1
    run_ranks(run, ranks, code.replace('"pipeline": 2', f'"pipeline": {ranks}'))
