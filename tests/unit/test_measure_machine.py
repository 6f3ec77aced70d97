"""`zeroshard plan --measure` and `--machine`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.config.machine_file import presets
from zeroshard.errors import UsageError
from zeroshard.planner.measure import Load, check_quiet, measure, read_load

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.table(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    (tmp_path / "net_on_machines.py").write_text(NET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "unit_min_numel": 1,
        "zero_optimization": {"stage": 3},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))

    def call(*options: str):
        words = ["plan", "net_on_machines:Net", "--config", "ds.json", "--seq", "16", *options]
        return CliRunner().invoke(main, words)

    return call


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (Load(4, 2.5, 0.0, 1.0), "other programs use 2.5 of 4 cores"),
        (Load(4, 0.0, 0.0, 7.5), "the load average is 7.5 with 4 cores"),
        (Load(4, 0.0, 0.12, 0.0), "12% of the CPU time goes to other virtual machines"),
    ],
)
def test_a_loaded_machine_is_not_measured_and_the_number_is_told(tmp_path, load, said):
    path = tmp_path / "machine.toml"
    with pytest.raises(UsageError) as found:
        measure(path, load=lambda: load)
    assert said in str(found.value)
    assert not path.exists()


def test_a_quiet_machine_is_measured():
    check_quiet(Load(4, 0.3, 0.01, 1.0))


def test_the_load_of_this_machine_is_read():
    load = read_load(0.05)
    assert load.cores >= 1
    assert 0 <= load.busy_cores <= load.cores
    assert 0 <= load.stolen <= 1


@pytest.mark.parametrize("name", presets())
def test_a_plan_with_a_preset_tells_time_and_assumptions(plan, name):
    result = plan("--machine", name, "--ranks", "4", "--verbose")
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.output
    assert "The band is 40% of the total: not measured were " in result.output
    assert "device.bytes_per_s (assumed)" in result.output
    assert "of the time: waits for a slower rank" in result.output
    assert result.stdout.startswith("fits, ")  # the memory of the machine is the limit


def test_json_has_the_time_of_a_step(plan):
    result = plan("--machine", "h100", "--ranks", "16", "--json")
    found = json.loads(result.stdout)["time"]
    low, high = found["band_s"]
    assert low < found["total_s"] < high
    parts = found["compute_s"] + found["all_exposed_s"] + found["host_s"]
    assert found["total_s"] == pytest.approx(parts)
    assert found["tokens_per_s"] == pytest.approx(16 * 4 * 16 / found["total_s"])
    assert found["sources"]["between_nodes.all_gather"] == "assumed"
    assert json.loads(plan("--ranks", "16", "--json").stdout)["time"] is None


@pytest.mark.full
def test_this_machine_is_measured_and_planned_with(plan, tmp_path):
    path = tmp_path / "machine.toml"
    machine = measure(path, turn_s=0.001, largest_nbytes=2**20, load=None)
    assert machine.execution == "serial"
    found = json.loads(plan("--machine", str(path), "--ranks", "2", "--json").stdout)["time"]
    assert set(found["sources"].values()) == {"measured"}
    assert found["total_s"] > 0
