"""``docs/format.md`` shows what ranks write, and its reader reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoint_model import Small, open_engine, stores, train
from safetensors import safe_open
from torch import nn
from zeroshard_testing import run_ranks

from zeroshard import Engine
from zeroshard.checkpoint.manifest import MANIFEST
from zeroshard.zero import safe_get_full_fp32_param

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", DOC, flags=re.S)
EXAMPLE = re.search(r"```json\n(.*?)```", DOC, flags=re.S)[1]


KEYS = {  # that the page names
    "rank-00000-of-00002.safetensors": {
        "value:0:weight",
        "exp_avg:0:weight",
        "exp_avg_sq:0:weight",
    },
    "rank-00001-of-00002.safetensors": {"value:128:weight", "value:0:bias"},
    "shared.safetensors": {"tree:0:shared/client_state/0"},
}


def saves_example(root: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(48, 4)
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with Engine(model, config=config, optimizer=optimizer) as engine:
        engine.backward(engine(torch.ones(1, 48, dtype=torch.bfloat16)).float().mean())
        engine.step()
        engine.save_checkpoint(root, client_state={"epoch": 1, "best": (0.5, torch.ones(2))})


def shown(text: str) -> str:
    """A manifest as the page has it: one line for each entry, and always the same."""
    head = json.loads(text)
    body = head["body"]
    head["sha256"] = "0" * 64
    body["saved_at"] = "2030-01-01T00:00:00+00:00"
    body["writer"] = {"zeroshard": "1.0.0", "torch": "2.13.0"}
    body["ranks"] = [{} for _ in body["ranks"]]
    for file in body["files"]:
        file["crc32"] = [0] * len(file["crc32"])
        file["nbytes"] = -(-file["nbytes"] // 4096) * 4096  # generators differ between versions
    return laid_out(head)


def laid_out(value: object, indent: str = "", width: int = 100) -> str:
    """JSON with line breaks where a line would be too long."""
    flat = json.dumps(value)
    if len(indent) + len(flat) <= width or not isinstance(value, (dict, list)):
        return flat
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{json.dumps(k)}: {laid_out(v, deeper, width)}" for k, v in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + laid_out(v, deeper, width) for v in value) + f"\n{indent}]"


def test_the_worked_example_is_what_two_ranks_write(tmp_path):
    run_ranks(saves_example, 2, str(tmp_path))
    path = tmp_path / "global_step1"
    assert shown((path / MANIFEST).read_text()) == EXAMPLE.strip()
    for name, keys in KEYS.items():
        with safe_open(path / name, framework="pt") as file:
            assert keys <= set(file.keys())
            assert all(f"`{key}`" in DOC for key in keys)


def saves(root: str, zero: dict, frozen: str) -> None:
    """Two checkpoints, and what they hold. The second refers to the first one's frozen weights."""
    keys = {"zero": zero, "checkpoint": {"frozen": frozen}}
    with open_engine(3, model=Small(), **keys) as engine:
        for _ in range(2):
            train(engine, 1)
            engine.save_checkpoint(root)
        full = {name: values.float() for name, values in engine.iter_full_params()}
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                full[name] = safe_get_full_fp32_param(param).clone()
        if engine.global_rank == 0:
            torch.save(full, Path(root) / "expected.pt")


@pytest.mark.parametrize("frozen", ["once", "always", "reference"])
@pytest.mark.parametrize("store", ["device", "optimizer on host", "all on disk"])
def test_the_reader_of_the_page_reads_what_three_ranks_wrote(tmp_path, store, frozen):
    run_ranks(saves, 3, str(tmp_path), stores(tmp_path / "swap")[store], frozen)
    expected = torch.load(tmp_path / "expected.pt")
    expected["head.weight"] = expected["embed.weight"]
    scope: dict = {}
    exec(PROGRAMS[1], scope)
    path = tmp_path / "global_step2"
    found = scope["read_fp32"](path)
    body = json.loads((path / MANIFEST).read_text())["body"]
    assert any(file["name"].startswith("../frozen-") for file in body["files"]) == (
        frozen == "once"
    )
    base = {name for name in expected if name.startswith("base.")}
    for name in base:
        data = expected[name].bfloat16().view(torch.uint8).numpy().tobytes()
        exec(PROGRAMS[0], scope)
        assert body["parameters"][name]["digest"] == {"dtype": "BF16", "sum": scope["digest"](data)}
    assert found.keys() == expected.keys() - (base if frozen == "reference" else set())
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert found["head.weight"] is found["embed.weight"]
