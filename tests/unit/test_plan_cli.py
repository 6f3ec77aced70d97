"""`zeroshard plan` of small models: verdicts, exit codes, and what cannot be planned."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main

MODELS = """
import torch
from torch import nn

WIDTH = 64

class Net(nn.Module):
    def __init__(self, extra=lambda y: y):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.extra = extra

    def forward(self, x):
        return self.extra(self.second(torch.tanh(self.first(x)))).mean()

def batch():
    return torch.empty(8, WIDTH)

def plain():
    return Net(), (batch(), None)

def item():
    def scaled(y):
        return y * y.sum().item()
    return Net(scaled), (batch(), None)

def nonzero():
    return Net(lambda y: y[y.sum(1).nonzero()]), (batch(), None)

def no_loss():
    return nn.Linear(WIDTH, WIDTH), (batch(), None)

def number():
    return 3
"""
PARAMS = 2 * 64 * 64


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "nets_to_plan.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(model: str, *options: str, stage: int = 1, ranks: int = 4, **keys: object):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
        } | keys
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = ["plan", model, "--config", "ds.json", "--ranks", str(ranks), *options]
        return CliRunner().invoke(main, words)

    return call


@pytest.mark.parametrize(
    ("stage", "shards"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))]
)
def test_json_has_the_bytes_of_the_formula_and_the_traffic(run, stage, shards):
    result = run("nets_to_plan:plain", "--json", stage=stage)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["parameters"] == PARAMS
    nbytes = {row["category"]: row["measured"] for row in found["memory"]}
    assert nbytes["parameters"] == 4 * PARAMS // shards[0]
    assert nbytes["gradients"] == 4 * PARAMS // shards[1]
    assert 0 <= nbytes["optimizer"] - 8 * PARAMS // shards[2] <= 16  # step counts
    assert found["peak_nbytes"] == max(p["device_nbytes"] for p in found["phases"].values())
    reduced = [row["numel"] for row in found["traffic"] if row["op"] == "reduce_scatter"]
    assert sum(reduced) == PARAMS
    assert found["assumed"] and found["not_modelled"]


def test_check_tells_by_its_exit_code_whether_the_run_fits(run):
    fits = run("nets_to_plan:plain", "--memory", "1", "--check")
    assert fits.exit_code == 0
    assert fits.stdout.startswith("fits, 1.00 GiB to spare")
    assert "not modelled:" in fits.stdout
    too_small = run("nets_to_plan:plain", "--memory", "0.00001", "--check")
    assert too_small.exit_code == 3
    assert too_small.stdout.startswith("does not fit: ")
    assert "on rank 0" in too_small.stdout


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("nets_to_plan:item", (), "nets_to_plan.py:24 (return y * y.sum().item()) calls "),
        ("nets_to_plan:nonzero", (), "nonzero.default, which depends on the values of a tensor"),
        ("nets_to_plan:no_loss", (), "the model returned FakeTensor without a loss"),
        ("nets_to_plan:number", (), "nets_to_plan:number returned int. It must return a model"),
        ("nets_to_plan:other", (), "the module 'nets_to_plan' has no 'other'"),
        ("nowhere_at_all:f", (), "there is no module 'nowhere_at_all'"),
        ("nets_to_plan:plain", ("--memory", "-1"), "--memory is -1 GiB, and no run fits into that"),
        ("nets_to_plan:plain", ("--check",), "--check compares with --memory"),
    ],
)
def test_mistakes_are_explained(run, model, options, text):
    result = run(model, *options)
    assert result.exit_code == 2, result.output
    assert text in result.output


def test_an_indivisible_batch_is_a_mistake_of_the_configuration(run):
    result = run("nets_to_plan:plain", train_batch_size=30)
    assert result.exit_code == 2
    assert "train_batch_size" in result.output


def test_an_unknown_model_is_named(run):
    pytest.importorskip("transformers")
    result = run("no_such_model")
    assert result.exit_code == 2
    assert "the model 'no_such_model' is not known" in result.output
