"""Every code block of the README and of ``docs/`` is run, read or named here with the test that does it.

:data:`TREATED` has one entry for each block of a page, in the order of the page. A page with another
number of blocks fails. To add a block, add what a test does with it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pages import PAGES, ROOT, Block, blocks_of, split
from torch import nn
from typer.testing import CliRunner
from zeroshard_testing import run_ranks

from zeroshard.cli.main import main
from zeroshard.config import load_config
from zeroshard.config.machine_file import parse_machine

Treatment = Callable[[Block, Path], None]
"""Called with a block and its page, in an empty directory. Raises if the block is wrong."""


# ---------------------------------------------------------------- Python


def runs(block: Block, page: Path) -> None:
    """A whole program of one process."""
    run_ranks(execute, 1, block.text, f"{page}:{block.line}", group=False)


def execute(code: str, name: str) -> None:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def continues(block: Block, page: Path) -> None:
    """A fragment of a program that has an ``engine``; it has made a step."""
    run_ranks(execute_with_engine, 2, block.text, f"{page}:{block.line}")


def execute_with_engine(code: str, name: str) -> None:
    import zeroshard

    engine, *_ = zeroshard.initialize(
        model=nn.Linear(8, 8),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3},
        },
    )
    engine.backward(engine(torch.ones(1, 8)).sum())
    engine.step()
    exec(compile(code, name, "exec"), {"engine": engine})
    engine.close()


def compiles(block: Block, page: Path) -> None:
    """A fragment that needs what a test does not have: a checkpoint of DeepSpeed, eight GPUs."""
    compile(block.text, f"{page}:{block.line}", "exec")


def planned(block: Block, page: Path) -> None:
    """A script that gives ``zeroshard plan`` its model."""
    Path("train.py").write_text(block.text)
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "Adam"}}'
    )
    result = CliRunner().invoke(main, ["plan", "train.py", "--config", "ds.json"])
    assert result.exit_code == 0, result.output


def planned_with_lora(block: Block, page: Path) -> None:
    """A script that plans adapters of a model of Transformers."""
    Path("my-model").mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    Path("my-model/config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    Path("lora.py").write_text(block.text)
    Path("ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, '
        '"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}'
    )
    result = CliRunner().invoke(main, ["plan", "lora.py", "--config", "ds.json", "--ranks", "8"])
    assert result.exit_code == 0, result.output


# ---------------------------------------------------------------- configurations


def configuration(block: Block, page: Path) -> None:
    """A whole configuration."""
    accepted(json.loads(block.text))


def of_two_hosts(block: Block, page: Path) -> None:
    """A whole configuration for hosts of eight ranks."""
    load_config(json.loads(block.text), world_size=16)


def keys(block: Block, page: Path) -> None:
    """Keys of a configuration."""
    accepted(json.loads(f"{{{block.text}}}"))


def zero_keys(block: Block, page: Path) -> None:
    """Keys of the section ``zero_optimization``."""
    accepted({"zero_optimization": {"stage": 3, **json.loads(f"{{{block.text}}}")}})


def accepted(config: dict[str, Any]) -> None:
    load_config({"train_micro_batch_size_per_gpu": 1, **config}, world_size=2)


def machine(block: Block, page: Path) -> None:
    """A part of a machine file."""
    assert parse_machine(block.text, f"{page}:{block.line}").name


# ---------------------------------------------------------------- commands


COMMAND = typer.main.get_command(main)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
FILES = {"first_run.py", "finetune.py", "offload.py"}
"""Programs that a tutorial tells to save."""
OTHERS = (
    "pip install .",
    'eval "$(zeroshard compat)"; accelerate launch train.py',
    "python runs/a/zero_to_fp32.py runs/a exported",  # tests/compat/test_deepspeed_checkpoints.py
)


def commands(block: Block, page: Path) -> None:
    """Lines for a shell. Options of ``zeroshard`` exist, and so do targets of the Makefile."""
    for line in block.text.splitlines():
        known(line)


def known(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "zeroshard":
        parsed(COMMAND, words)
    elif words[0] == "make":
        assert set(words[1:]) <= TARGETS, line
    elif words[0] == "python" and words[1] in FILES:
        pass  # tests/compat/test_tutorials.py
    else:
        assert line.partition("  #")[0].strip() in OTHERS, f"nobody checks: {line}"


def parsed(command: Any, words: list[str]) -> None:
    """Parse a command line with its subcommands, without calling it."""
    context = command.make_context(words[0], words[1:])
    if hasattr(command, "commands"):
        rest = context._protected_args + context.args
        parsed(command.commands[rest[0]], rest)


def changed_loop(block: Block, page: Path) -> None:
    """A program before and after a change: both are Python."""
    assert block.language == "diff"
    for left_out in "+-":
        kept = [line[1:] for line in block.text.splitlines() if line[:1] != left_out]
        compile("\n".join(kept), f"{page}:{block.line}", "exec")


# ---------------------------------------------------------------- the others


def in_test(name: str) -> Treatment:
    """Another test runs it, or compares it with what is printed or written."""

    def treat(block: Block, page: Path) -> None:
        assert page.name in (ROOT / "tests" / name).read_text()

    return treat


def by_hand(block: Block, page: Path) -> None:
    """Commands that need packages which the tests do not install: the program has these options."""
    _, program, options = re.split(r"(examples/\S+)", block.text)
    source = (ROOT / program).read_text()
    assert [name for name in re.findall(r"--\w+", options) if f'"{name}"' not in source] == []


def shown(block: Block, page: Path) -> None:
    """Text to look at: a message, a directory."""
    assert not block.language


def api(block: Block, page: Path) -> None:
    """Names whose docstrings Sphinx renders: ``test_api_page.py``."""
    assert block.language == "{eval-rst}"


def toctree(block: Block, page: Path) -> None:
    """A list of the site's pages: ``test_links.py``."""
    assert block.language == "{toctree}"


TUTORIAL, FORMAT, INTEGRATIONS = (
    in_test("compat/test_tutorials.py"),
    in_test("ranks/test_format_page.py"),
    in_test("compat/test_integrations_page.py"),
)
RAY = in_test("programs/test_ray.py")
TYPES = in_test("unit/test_checkpoint_format.py")
FINE_TUNE, FSDP2 = in_test("compat/test_fine_tune_page.py"), in_test("compat/test_fsdp2_page.py")
README, PIPELINE = in_test("unit/test_readme.py"), in_test("compat/test_pipeline_page.py")

TREATED: dict[str, list[Treatment]] = {
    "README.md": [commands, changed_loop, configuration, commands, README, commands, README],
    "docs/api.md": [api] * 11,
    "docs/checkpoints.md": [continues, shown, keys, commands, continues, commands],
    "docs/choose.md": [commands, shown, shown, configuration, commands, shown],
    "docs/clusters.md": [commands, shown, commands, commands, shown, shown, shown, RAY],
    "docs/config.md": [configuration],
    "docs/doctor.md": [commands, shown],
    "docs/fine-tune.md": [
        *(FINE_TUNE, FINE_TUNE, FINE_TUNE, configuration, FINE_TUNE),
        *(compiles, commands, commands),
    ],
    "docs/format.md": [TYPES, FORMAT, FORMAT, FORMAT],
    "docs/fsdp2.md": [FSDP2, FSDP2, shown, FSDP2],
    "docs/gpu.md": [commands, *[configuration] * 4],
    "docs/index.md": [commands, changed_loop, commands, toctree, toctree, toctree, toctree],
    "docs/integrations.md": [INTEGRATIONS] * 7,
    "docs/migrate.md": [commands, compiles, compiles],
    "docs/monitors.md": [configuration, compiles, commands],
    "docs/offload.md": [configuration, configuration, continues, commands],
    "docs/parallel.md": [shown, compiles, runs],
    "docs/pipeline.md": [PIPELINE, PIPELINE, PIPELINE],
    "docs/plan.md": [
        *(commands, shown, shown, commands, commands, commands, planned),
        *(planned_with_lora, commands, commands),
    ],
    "docs/plan-reference.md": [commands, planned, shown, shown, shown, commands, machine],
    "docs/recipes.md": [by_hand],
    "docs/restart.md": [commands, compiles, compiles, commands, keys, commands, shown],
    "docs/experts.md": [configuration, compiles, commands],
    "docs/hierarchy.md": [of_two_hosts],
    "docs/sequence.md": [compiles, compiles, compiles, commands],
    "docs/stalls.md": [shown, shown, shown, shown, keys],
    "docs/tutorials/first_run.md": [commands, TUTORIAL, commands, TUTORIAL, commands, commands],
    "docs/tutorials/offload.md": [TUTORIAL, commands, TUTORIAL, commands, TUTORIAL],
    "docs/tutorials/trainer.md": [TUTORIAL, TUTORIAL, commands, commands, TUTORIAL, TUTORIAL],
}


def cases() -> list[Any]:
    found = []
    for name, treatments in TREATED.items():
        for block, treatment in zip(blocks_of(ROOT / name), treatments):  # counted below
            found.append(pytest.param(ROOT / name, block, treatment, id=f"{name}:{block.line}"))
    return found


@pytest.mark.parametrize(("page", "block", "treatment"), cases())
def test_a_block_is_right(page, block, treatment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    treatment(block, page)


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_block_of_a_page_is_left_out(page):
    listed = TREATED.get(str(page.relative_to(ROOT)), [])
    assert len(listed) == len(blocks_of(page)), "say in TREATED what a test does with each block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_is_in_fences(page):
    """An indented block would be code too, and no test would see it."""
    prose = split(page.read_text(encoding="utf-8"))[0]
    assert re.findall(r"\n\n {4,}[^ *\-\d].*", prose) == []


def test_a_command_that_does_not_exist_is_found():
    with pytest.raises(Exception, match="no-such-option"):
        known("zeroshard launch --no-such-option train.py")
    with pytest.raises(AssertionError):
        known("make nothing-of-this-name")
    with pytest.raises(AssertionError, match="nobody checks"):
        known("rm -r runs")
