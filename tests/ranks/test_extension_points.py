"""The examples of CONTRIBUTING run: an optimizer, a transport, a tier, a monitor, a configuration key.

Each example is a block of Python in that file. The test makes a module of it.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
from pydantic import create_model
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.comm import connect
from zeroshard.config import params
from zeroshard.config.fields import honour
from zeroshard.config.sections import MonitorSections
from zeroshard.core import tiers
from zeroshard.metrics import sinks
from zeroshard.metrics.monitors import build_monitors
from zeroshard.zero import safe_get_full_fp32_param, safe_get_full_optimizer_state

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def tables() -> dict[int, dict]:
    """Copies of all tables of the package, by identity."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "zeroshard"]
    found = [item for module in modules for item in vars(module).items()]
    return {id(v): dict(v) for name, v in found if name.isupper() and isinstance(v, dict)}


def example(name: str, folder: Path, *, files: int = 2) -> ModuleType:
    """The block of CONTRIBUTING whose first line names the file ``name``, imported.

    ``files``: how many files of the package the change touches: a new one, and one for each table with a
    new row.
    """
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (source,) = [block for block in blocks if block.startswith(f"# {name}.py\n")]
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    before = tables()
    try:
        module = importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
    after = tables()
    assert 1 + sum(after[key] != before[key] for key in before) == files
    return module


@on_ranks(2)
def test_a_new_optimizer_is_a_class_and_a_row(tmp_path):
    with mock.patch.dict(params.OPTIMIZERS):
        example("sign_sgd", tmp_path)
        torch.manual_seed(0)
        model = nn.Linear(8, 3)
        plain = nn.Linear(8, 3)
        plain.load_state_dict(model.state_dict())
        config = {
            "train_batch_size": 8,
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "signsgd", "params": {"lr": 0.125, "dead_zone": 0.001}},
        }
        x = torch.arange(32.0).view(4, 8).sin()
        with Engine(model, config=config) as engine:
            engine.backward(engine(x).square().mean())
            engine.step()
            full = dict(engine.iter_full_params())
            weight = full["weight"].clone()
    plain(x).square().mean().backward()
    grad = plain.weight.grad
    wanted = plain.weight.detach() - 0.125 * grad.sign() * (grad.abs() >= 0.001)
    assert torch.equal(weight, wanted)


@on_ranks(2)
def test_a_new_transport_is_a_class_and_a_row(tmp_path):
    with mock.patch.dict(connect.TRANSPORTS):
        counted = example("counted_comm", tmp_path)
        comm = connect.make_comm(transport="counted")
        assert isinstance(comm, counted.CountedComm)
        full_N = torch.zeros(4)
        comm.all_gather(full_N, torch.full((2,), float(comm.rank)), name="example").wait()
        assert full_N.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert comm.gathers == 1
        comm.close()


def trained(zero: dict) -> tuple[dict[str, torch.Tensor], dict[tuple[str, str], int]]:
    """Parameters, masters and moments after three steps, and bytes by tier and category."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3))
    config = {
        "train_batch_size": 8,
        "unit_min_numel": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, **zero},
    }
    x = torch.arange(64.0).view(4, 16).sin().bfloat16()
    with Engine(model, config=config) as engine:
        for _ in range(3):
            engine.backward(engine(x).float().square().mean())
            engine.step()
        values = {}
        for name, param in model.named_parameters():
            values[name] = safe_get_full_fp32_param(param).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                values[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone()
        values |= {f"{name} in bf16": value.clone() for name, value in engine.iter_full_params()}
        report = engine.memory_report()
        for row in report.rows:
            assert row.planned in (None, row.measured) or row.category == "gradients", row
        return values, {(row.tier, row.category): row.measured for row in report.rows}


@on_ranks(2)
def test_a_new_tier_is_a_class_and_a_row(tmp_path):
    with mock.patch.dict(tiers.TIERS):
        example("mapped_tier", tmp_path)
        on_device, _ = trained({})
        keys = ("offload_optimizer", "offload_param")
        mapped, measured = trained({key: {"device": "mapped"} for key in keys})
    assert mapped.keys() == on_device.keys()
    for name, value in mapped.items():
        assert torch.equal(value, on_device[name]), name
    for category in ("parameters", "master", "optimizer"):
        assert measured["mapped", category] > 0
        assert measured["device", category] == 0


def test_a_new_monitor_is_a_class_and_a_row(tmp_path, capsys):
    with mock.patch.dict(sinks.SINKS):
        module = example("console_sink", tmp_path)
        fields = {"console": (module.ConsoleConfig, honour(module.ConsoleConfig, "Print values."))}
        sections = create_model("Sections", __base__=MonitorSections, **fields)
        monitors = build_monitors(sections(console={"enabled": True, "prefix": "> "}))
    monitors.write([("Train/Samples/lr", 0.5, 8)])
    monitors.close()
    assert capsys.readouterr().out == "> Train/Samples/lr 0.5 after 8 samples\n"


def test_a_new_key_is_a_field(tmp_path):
    section = example("new_key", tmp_path, files=1).ExampleConfig
    assert section().warmup_rounds == 0
    assert section(warmup_rounds=3).warmup_rounds == 3
    with pytest.raises(ValueError, match="warmup_rounds"):
        section(warmup_rounds=-1)
