"""The code blocks of the README run unedited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TRAINS, SAVES = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


def run(block: str) -> dict:
    names = {"__name__": "readme"}
    exec(compile(block, str(README), "exec"), names)
    return names


@pytest.mark.smoke
def test_the_first_block_trains(capsys):
    run(TRAINS)
    norm, skipped = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert float(norm) > 0
    assert skipped == "False"


@pytest.mark.smoke
def test_the_second_block_saves_and_loads():
    names = run(SAVES)
    assert names["client_state"] == {"epoch": 3}
    assert names["path"] == f"{names['directory']}/global_step0"
