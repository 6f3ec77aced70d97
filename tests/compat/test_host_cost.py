"""The measurement of host time runs, and computes what its page says."""

from __future__ import annotations

import importlib
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


def test_ratios_are_those_of_each_round(monkeypatch):
    """A round in which the processor is slow has the ratio of the others."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    host_cost = importlib.import_module("host_cost")
    us = {"plain loop": (10, 0), "FSDP2, resharded": (110, 20), "ZeroShard stage 3": (60, 10)}
    rounds = [
        {
            name: {"all": all_us * slow, "group": group * slow}
            for name, (all_us, group) in us.items()
        }
        for slow in (1.0, 1.0, 3.0)
    ]
    assert host_cost.ratios(rounds) == {"ZeroShard stage 3": [0.5] * 3}
    assert host_cost.ratios(rounds, but_group=True) == {"ZeroShard stage 3": [0.5] * 3}
    rounds[2]["ZeroShard stage 3"]["all"] = 130.0
    assert host_cost.ratios(rounds)["ZeroShard stage 3"][2] == pytest.approx(100 / 300)
    assert host_cost.middle(rounds)["ZeroShard stage 3"]["all"] == 60


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
