"""The program of docs/clusters.md under the real Ray Train, also with a worker that is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray: make test-programs installs it")

ROOT = Path(__file__).parents[2]
[PROGRAM] = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/clusters.md").read_text(), flags=re.DOTALL
)
MAKES_DIRECTORY = "DIRECTORY = tempfile.mkdtemp()  # shared by all machines\n"
SAVES = "        engine.save_checkpoint(DIRECTORY)\n"
LOOP = "    while engine.global_steps < 6:\n"
ENDS = "    engine.close()\n"
KILLS = """
        import os, pathlib
        marker = pathlib.Path(DIRECTORY, "was-killed")
        if engine.global_steps == 3 and os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), 9)
"""
TELLS = """
    import json, os, pathlib
    values = [p.tolist() for _, p in engine.iter_full_params()]
    if os.environ["RANK"] == "0":
        pathlib.Path(DIRECTORY, "end.json").write_text(json.dumps([begin, engine.global_steps, values]))
"""


def run(folder: Path, kills: str) -> list:
    """The step at which the last attempt began, that at its end, and its parameters.

    ``kills``: code after each save.
    """
    folder.mkdir()
    program = PROGRAM
    for old, new in (
        (MAKES_DIRECTORY, f"DIRECTORY = {str(folder)!r}\n"),
        (LOOP, "    begin = engine.global_steps\n" + LOOP),
        (SAVES, SAVES + kills),
        (ENDS, TELLS + ENDS),
    ):
        assert program.count(old) == 1
        program = program.replace(old, new)
    (folder / "train.py").write_text(program)
    env = {**os.environ, "RAY_DISABLE_MEMORY_MONITOR": "1", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=env, capture_output=True, text=True,
        timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((folder / "end.json").read_text())


@pytest.mark.timeout(400)
def test_a_run_whose_worker_is_killed_has_the_bits_of_one_that_was_not(tmp_path):
    begin, end, parameters = run(tmp_path / "plain", "")
    assert (begin, end) == (0, 6)
    assert run(tmp_path / "killed", KILLS) == [3, 6, parameters]
    assert (tmp_path / "killed/was-killed").exists()
