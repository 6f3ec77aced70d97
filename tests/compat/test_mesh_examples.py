"""The examples of meshes run on a mesh and then on one rank, at a tiny size, and find equal losses."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
from zeroshard_testing.ranks import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ("--steps", "4", "--dim", "64", "--context", "16", "--vocab", "300")
OWN_MODULES = ("model", "data")  # other examples have modules of these names


def run(example: str, argv: list[str]) -> str:
    """What the program printed on this rank."""
    said, program = io.StringIO(), EXAMPLES / example / "train.py"
    keep_group = mock.patch("torch.distributed.destroy_process_group")  # the kit ends it
    patched = mock.patch.object(sys, "argv", [str(program), *argv])
    path = mock.patch.object(sys, "path", [str(program.parent), *sys.path])
    for name in OWN_MODULES:
        sys.modules.pop(name, None)
    try:
        with patched, path, keep_group, contextlib.redirect_stdout(said):
            importlib.invalidate_caches()
            runpy.run_path(str(program), run_name="__main__")
    finally:
        for name in OWN_MODULES:
            sys.modules.pop(name, None)
    return said.getvalue()


@pytest.fixture
def options(tmp_path):
    """The command line of a tiny run in ``tmp_path``."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {at}: {at * at} is the square of {at}.\n" for at in range(4000)))
    return [*TINY, "--text", str(text), "--runs", str(tmp_path)]


def test_eight_ranks_and_one_have_the_same_losses(tmp_path, options):
    options += ["--tests", "1", "--threads", "1"]
    run_ranks(run, 8, "train_3d", options, timeout=100)
    said = run_ranks(run, 1, "train_3d", [*options, "--compare"], timeout=60)[0]
    saved = json.loads((tmp_path / "losses.json").read_text())
    assert saved["mesh"] == "pipeline 2 x data_shard 2 x tensor 2"
    assert len(saved["losses"]) == 4
    assert saved["losses"][-1] < saved["losses"][0]
    [apart] = re.findall(r"largest difference .*: (\S+)", said)
    assert float(apart) < 1e-4
    [loaded] = re.findall(r"loaded into one rank, .*: (\S+)", said)
    assert abs(float(loaded) - saved["held_out"]) < 1e-5


def test_a_llama_over_tensor_ranks_has_the_losses_of_one_rank(tmp_path, options):
    pytest.importorskip("transformers")
    run_ranks(run, 4, "llama_tensor", [*options, "--tensor", "2"], timeout=100)
    said = run_ranks(run, 1, "llama_tensor", [*options, "--compare"], timeout=60)[0]
    saved = json.loads((tmp_path / "losses.json").read_text())
    assert saved["mesh"] == "data_shard 2 x tensor 2"
    assert saved["losses"][-1] < saved["losses"][0]
    [apart] = re.findall(r"largest difference .*: (\S+)", said)
    assert float(apart) < 1e-4
