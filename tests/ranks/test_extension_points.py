"""Do the worked examples of CONTRIBUTING work: a new optimizer, a new transport, a new configuration key?

Each example is a block of Python there, which becomes a module here.
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
from torch import nn

from zeroshard import Engine
from zeroshard.comm import connect
from zeroshard.config import params
from zeroshard.testing import on_ranks

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def example(name: str, folder: Path) -> ModuleType:
    """The block of CONTRIBUTING whose first line names the file ``name``, imported."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (source,) = [block for block in blocks if block.startswith(f"# {name}.py\n")]
    (folder / f"{name}.py").write_text(source)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


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


def test_a_new_key_is_a_field(tmp_path):
    section = example("new_key", tmp_path).ExampleConfig
    assert section().warmup_rounds == 0
    assert section(warmup_rounds=3).warmup_rounds == 3
    with pytest.raises(ValueError, match="warmup_rounds"):
        section(warmup_rounds=-1)
