"""The command that an error of missing memory prints: it runs as printed, and what it finds fits."""

from __future__ import annotations

import json
import re
import shlex
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import kit
import pytest
import torch
from support.remedies import Limited
from torch import nn
from typer.testing import CliRunner
from zeroshard_testing.ranks import run_ranks

from zeroshard import Engine
from zeroshard.cli.main import main
from zeroshard.comm.env import RankInfo
from zeroshard.config import load_config
from zeroshard.core.mesh import Mesh
from zeroshard.engine.remedies import PlannedRun, config_of, search_lines

ROWS, LENGTH, PART = 8, 64, 0.75


def command(told: str) -> list[str]:
    """The words of the printed command, without the name of the program."""
    (line,) = re.findall(r"^ +zeroshard (plan .*)$", told, re.MULTILINE)
    return shlex.split(line)


def ran(words: list[str]) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    return result.stdout


def llama(config: dict[str, Any], part: float, peak: int, recomputing: bool) -> tuple[str, int]:
    """Two steps with ``part`` of ``peak``: what is told if memory is missing, and the peak."""
    import transformers

    made = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(made).train()
    if recomputing:
        model.gradient_checkpointing_enable()
    memory = Limited(part * peak if peak else float("inf"))
    with memory:
        for param in model.parameters():
            param.data = param.data.clone()  # memory is followed from here on
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        named = None if "optimizer" in config else optimizer
        with Engine(model, config=config, optimizer=named) as engine:
            engine.memory_baseline.activations = lambda _: (
                memory._live - engine.runtime.ledger.totals()[1]
            )
            ids = torch.ones(engine.train_micro_batch_size_per_gpu(), LENGTH, dtype=torch.long)
            try:
                for _ in range(2 * engine.gradient_accumulation_steps()):
                    engine.backward(engine(input_ids=ids, labels=ids).loss)
                    engine.step()
            except torch.OutOfMemoryError as error:
                return str(error), memory.peak
    return "", memory.peak


def test_the_command_runs_as_printed_and_the_run_fits_with_what_it_finds(tmp_path):
    """The optimizer is one of the program, and the model exists in the program only."""
    pytest.importorskip("transformers")
    config = kit.config(
        2, train_micro_batch_size_per_gpu=ROWS, transport="p2p", trust={"dump_dir": str(tmp_path)}
    )
    given = [config, PART, 0, False]
    ((told, peak), _) = run_ranks(llama, 2, *given, timeout=120)
    assert not told
    told = next(text for text, _ in run_ranks(llama, 2, config, PART, peak, False) if text)
    words = command(told)
    assert words[-2:] == ["--fit", "speed"]
    assert words[words.index("--ranks") + 1] == "2"
    assert words[words.index("--seq") + 1] == str(LENGTH)
    found = json.loads(ran([*words, "--json"]))
    assert found["config"]["optimizer"]["type"] == "AdamW"
    again = run_ranks(llama, 2, found["config"], PART, peak, found["checkpointing"], timeout=120)
    assert [text for text, _ in again] == ["", ""], (found["chosen"], told)


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def planned(folder: Path, model: nn.Module, mesh: Mesh = Mesh(), **config: Any) -> PlannedRun:
    keys = {"train_micro_batch_size_per_gpu": 4, "trust": {"dump_dir": str(folder)}, **config}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    ranks = RankInfo(world_size=mesh.world_size, local_world_size=mesh.world_size)
    loaded = load_config(keys, world_size=mesh.world_size)
    return PlannedRun(model, loaded, optimizer, mesh, ranks, False, 4, 2)


SCRIPT = """
import torch
from torch import nn

class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).square().mean()
"""
FUNCTION = """
def plan_entry():
    return Squares(), {"x": torch.empty(4, 8)}
"""


@pytest.mark.parametrize("has_function", [False, True])
def test_a_model_without_a_name_is_planned_by_a_function_of_the_script(
    tmp_path, monkeypatch, has_function
):
    script = tmp_path / "my train.py"
    program = types.ModuleType("__main__")
    program.__file__ = str(script)
    if has_function:
        program.plan_entry = None
    monkeypatch.setitem(sys.modules, "__main__", program)
    text, line = search_lines(planned(tmp_path, Squares()), 1 << 20)
    assert "Squares is not a model of Transformers" in text
    assert (f"define plan_entry() in {script}" in text) is not has_function
    script.write_text(SCRIPT + FUNCTION)
    assert "fits, 0.000975 GiB to spare" in ran(command(line))


def test_what_the_program_said_is_in_the_configuration(tmp_path):
    run = planned(tmp_path, Squares(), Mesh(data_replicate=2, data_shard=2), train_batch_size=16)
    found = config_of(run)
    assert found["optimizer"] == {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
    assert found["parallel"] == {"data_replicate": 2}
    assert "train_batch_size" not in found
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 2


class Own(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})


def test_an_optimizer_that_no_configuration_names_is_told(tmp_path):
    run = planned(tmp_path, Squares())
    run = replace(
        run,
        optimizer=Own(run.model.parameters()),
        ranks=RankInfo(world_size=6, local_world_size=2),
        tokens=5,
    )
    text, line = search_lines(run, 1 << 30)
    assert "by simulation with Adam in place of Own (" in text
    assert "--ranks 6 --ranks-per-node 2" in line
    assert "--seq" not in line  # the function may return a batch
    uneven = replace(run, ranks=RankInfo(world_size=6, local_world_size=4))
    assert "--ranks-per-node" not in search_lines(uneven, 1 << 30)[1]  # which must divide


def test_without_a_folder_nothing_is_printed(tmp_path):
    (tmp_path / "file").write_text("")
    assert search_lines(planned(tmp_path / "file", Squares()), 1) == []


@pytest.mark.parametrize(
    ("kind", "frozen", "why"),
    [
        ("LlamaForCausalLM", False, ""),
        ("LlamaForCausalLM", True, "some of its parameters are frozen"),
        ("LlamaModel", False, "LlamaModel computes no loss"),
        (
            "ViTForImageClassification",
            False,
            "inputs of ViTForImageClassification are pixel_values",
        ),
    ],
)
def test_a_model_of_transformers_is_named_if_its_configuration_says_all(
    tmp_path, kind, frozen, why
):
    transformers = pytest.importorskip("transformers")
    made = getattr(transformers, kind)
    config = made.config_class(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8,
        num_key_value_heads=1, image_size=16,
    )  # fmt: skip
    model = made(config).to(torch.float64)
    next(model.parameters()).requires_grad_(not frozen)
    text, line = search_lines(planned(tmp_path, model), 1 << 30)
    assert why in text
    assert ("--fit" in line) is (not why)
    if not why:
        written = json.loads(Path(command(line)[1]).read_text())
        assert written["architectures"] == [kind]
        assert written["dtype"] == "float64"
