"""The measurement of host time runs, and computes what its page says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_a_smoke_run_measures_every_line(tmp_path):
    out = tmp_path / "cost.json"
    command = [sys.executable, str(BENCHMARKS / "host_cost.py"), "--smoke", "--json", str(out)]
    done = warm_python.run(command, cwd=tmp_path, env=os.environ, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert set(result["ratios"]) == {
        "ZeroShard stage 2",
        "ZeroShard stage 3",
        "stage 3, matrices apart",
    }
    for name, own_us in result["own_us"].items():
        for phase, us in own_us.items():
            plain_us = result["us_per_block"]["plain loop"][phase]
            assert us == pytest.approx(result["us_per_block"][name][phase] - plain_us)
    stage_3, peer = (result["own_us"][n]["all"] for n in ("ZeroShard stage 3", "FSDP2, resharded"))
    assert result["ratios"]["ZeroShard stage 3"] == pytest.approx(stage_3 / peer)


def test_a_smoke_run_compares_the_modules_of_tensor_parallelism(tmp_path):
    out = tmp_path / "cost.json"
    command = [sys.executable, str(BENCHMARKS / "tensor_cost.py"), "--smoke", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(out.read_text())
    assert set(result["ratios"]) == {"plain loop", "engine"}
    for loop, ratio in result["ratios"].items():
        torchs, ours = (
            result["ms_per_step"][f"{loop}, {who} modules"]["cpu_ms"]
            for who in ("torch's", "ZeroShard's")
        )
        assert ratio["cpu_ms"] == pytest.approx(ours / torchs)
        assert min(ours, torchs) > 0
