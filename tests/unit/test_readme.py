"""Do the code blocks of the README run as they stand?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(block, capsys):
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})
    norm, skipped = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert float(norm) > 0
    assert skipped == "False"
