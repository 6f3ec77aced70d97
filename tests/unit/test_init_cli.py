"""``zeroshard init``: what it asks, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.config import load_config

MODEL = "words.py:words"
SCRIPT = """
from torch import nn

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.table(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def words():
    return Words()
"""
FEW = ["--seq", "16", "--batch", "4"]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A function that runs the command in a folder with the model's script alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.py").write_text(SCRIPT)

    def run(*words: str, answers: str = ""):
        return CliRunner().invoke(main, ["init", *words], input=answers)

    return run


def test_four_answers_give_a_configuration_that_loads(runs, tmp_path):
    done = runs(*FEW, answers=f"{MODEL}\n2\n1\nfp16\n")
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "zeroshard.json").read_text())
    config = load_config(written, world_size=2).config
    assert config.train_batch_size == 4
    assert config.fp16.enabled
    assert written["zero_optimization"]["stage"] == 0  # it is tiny
    for words in (
        "zeroshard.json: stage 0",
        "of 1.00 GiB",
        "zeroshard launch --nproc 2 train.py",
        "Planned for a batch of input_ids and labels of 2 x 16 tokens, without attention mask (--seq)",
    ):
        assert words in done.output
    options = "--config zeroshard.json --ranks 2 --memory 1 --target cuda --seq 16"
    assert f"plan {MODEL} {options}" in done.output


def test_yes_asks_nothing_and_replaces_no_file(runs, tmp_path):
    given = ["--model", MODEL, "--gpus", "2", "--memory", "h100", *FEW, "--yes"]
    done = runs(*given)
    assert done.exit_code == 0, done.output
    assert "--machine h100" in done.output
    written = (tmp_path / "zeroshard.json").read_text()
    assert json.loads(written)["bf16"] == {"enabled": True}
    again = runs(*given)
    assert again.exit_code == 2
    assert "zeroshard.json exists already. Give --overwrite, or another --output." in again.output
    assert (tmp_path / "zeroshard.json").read_text() == written


def test_nothing_is_written_if_nothing_fits(runs, tmp_path):
    done = runs("--model", MODEL, "--gpus", "2", "--memory", "0.0000001", *FEW, "--yes")
    assert done.exit_code == 3, done.output
    assert "Nothing fits" in done.output
    assert not (tmp_path / "zeroshard.json").exists()


@pytest.mark.parametrize("gpus", ["0", "-1"])
def test_no_gpu_is_no_answer(runs, tmp_path, gpus):
    done = runs(*FEW, answers=f"{MODEL}\n{gpus}\n1\nbf16\n")
    assert done.exit_code == 2
    assert f"GPUs: {gpus}. Give a number from 1." in done.output
    assert not [*tmp_path.glob("*.json")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--yes"], "--yes needs --model"),
        (["--yes", "--model", "no/such/model"], "no/such/model"),
        (["--yes", "--model", MODEL, "--memory", "h900"], "h900"),
        (["--yes", "--model", MODEL, "--memory", "-5"], "-5"),
        (["--yes", "--model", MODEL, "--memory", "nan"], "nan"),
        (["--yes", "--model", MODEL, "--batch", "3", "--gpus", "2"], "train_batch_size"),
        (["--yes", "--model", MODEL, "--precision", "int4"], "int4"),
        (["--yes", "--model", MODEL, "--output", "no/folder/x.json"], "no/folder"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_written(runs, tmp_path, words, said):
    done = runs(*words)
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert not [*tmp_path.glob("*.json")]


def test_simulations_are_named_only_where_someone_asks(runs):
    given = ["--model", MODEL, "--gpus", "2", "--memory", "1", *FEW, "--yes"]
    assert "simulation" not in runs(*given).stderr
    assert "simulation 1: stage 0" in runs(*given, "--overwrite", "--verbose").stderr


def mixtral(folder: Path, experts: int = 4) -> str:
    """A model whose parameters are nearly all in experts."""
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=experts, vocab_size=64, max_position_embeddings=16,
        architectures=["MixtralForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def test_gpus_share_experts_where_they_do_not_fit_otherwise(runs, tmp_path):
    words = ["--model", mixtral(tmp_path), "--gpus", "4", "--yes", "--batch", "4", "--overwrite"]
    told = {
        "1": "Experts: not shared, each GPU computes those that its tokens need.",
        "0.003": "Experts: 4 GPUs share those of a layer (parallel.expert): each has 1/4 of them",
    }
    for memory, line in told.items():
        done = runs(*words, "--memory", memory, "--seq", "8")
        assert done.exit_code == 0, done.output
        assert line in done.output
        written = json.loads((tmp_path / "zeroshard.json").read_text())
        assert written.get("parallel") == (None if memory == "1" else {"expert": 4})
        assert load_config(written, world_size=4).config.train_batch_size == 4


def test_experts_that_gpus_cannot_share_equally_are_not_mentioned(runs, tmp_path):
    words = ["--model", mixtral(tmp_path, experts=3), "--gpus", "4", "--yes", "--batch", "4"]
    done = runs(*words, "--memory", "1", "--seq", "8")
    assert done.exit_code == 0, done.output
    assert "Experts:" not in done.output and ", expert " not in done.output
