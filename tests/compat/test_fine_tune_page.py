"""The programs of ``docs/fine-tune.md`` train, resume and export on two ranks, with short samples."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from by_name import no_deepspeed_on_ranks  # noqa: F401
from programs import ROOT, launched, on_warm_ranks, torchrun

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

PAGE = (ROOT / "docs" / "fine-tune.md").read_text()
pytestmark = pytest.mark.usefixtures("no_deepspeed_on_ranks")
PROGRAMS = {
    name: code for code, name in re.findall(r"```python\n(# (\S+)\n.*?)```", PAGE, re.DOTALL)
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model, a text of 40 samples and the files of the page, where the programs run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    transformers.utils.logging.disable_progress_bar()  # its thread would stay
    tokenizer = transformers.ByT5Tokenizer()
    shape = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(shape).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "text.txt").write_text(Path(argparse.__file__).read_text()[: 40 * 32 + 8])
    for name, code in PROGRAMS.items():
        (tmp_path / name).write_text(code.replace("length=1024", "length=32"))
    [config] = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "ds.json").write_text(config)
    return tmp_path


def run(folder: Path, name: str) -> str:
    return on_warm_ranks(2, folder / name, "base", "text.txt")


def assert_loads(folder: Path) -> None:
    trained = transformers.AutoModelForCausalLM.from_pretrained(folder / "final")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    same = [bool((a == b).all()) for a, b in zip(trained.parameters(), base.parameters())]
    assert not all(same)


def test_the_program_with_the_trainer(folder):
    run(folder, "with_trainer.py")
    assert_loads(folder)
    assert (folder / "runs/trainer/checkpoint-5/latest").is_file()
    assert transformers.AutoTokenizer.from_pretrained(folder / "final")


def test_the_program_with_accelerate_runs_again_from_its_state(folder):
    losses = re.findall(r"^loss ([\d.]+)$", run(folder, "with_accelerate.py"), re.MULTILINE)
    assert len(losses) == 5
    again = re.findall(r"^loss ([\d.]+)$", run(folder, "with_accelerate.py"), re.MULTILINE)
    assert len(again) == 5
    assert_loads(folder)


def test_the_plain_loop_goes_on_where_it_was(folder):
    file = folder / "plain.py"
    program = file.read_text()
    file.write_text(program.replace("% 100 == 0", "% 2 == 0").replace(
        'engine.save_checkpoint("runs/plain")\nengine.save_pretrained', "engine.save_pretrained"
    ))  # fmt: skip
    said = launched(
        *torchrun(2),
        str(file),
        "base",
        "text.txt",
        cwd=folder,
        imports=["transformers"],
        PYTHONPATH="",
    )
    steps = re.findall(r"^step (\d+) loss", said, re.MULTILINE)
    assert steps == ["1", "2", "3", "4", "5"]
    file.write_text(program)
    said = run(folder, "plain.py")
    assert re.findall(r"^step (\d+) loss", said, re.MULTILINE) == ["5"]
    assert_loads(folder)
    trained = (folder / "final/model.safetensors").read_bytes()
    assert "step " not in run(folder, "plain.py")  # it is finished
    assert (folder / "final/model.safetensors").read_bytes() == trained
