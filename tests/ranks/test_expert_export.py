"""Ranks that share experts write the weights of all of them, as one process would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import config
from safetensors.torch import load_file
from support import expert_models as tiny
from support.covering import each_value
from support.expert_models import WIDTH, Setting
from support.expert_runs import CUT, PLAN, opened, trained
from torch import Tensor, nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import (
    export_checkpoint,
    get_fp32_state_dict_from_zero_checkpoint,
)
from zeroshard.core.mesh import Mesh
from zeroshard.engine.expert_export import _Told, united_of
from zeroshard.parallel import MoE
from zeroshard.report.record import read_record

SETTING = Setting(residual=True)
LR = 0.1


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize(
    ("ep_size", "stage", "far"),
    each_value([(ep, stage, far) for ep in (2, 4) for stage in (3, 1) for far in (False, True)]),
)
@on_ranks(4)
def test_all_experts_are_written(ep_size, stage, far, tmp_path):
    """After training; the result is that of one process with the batches of four ranks."""
    keys = {"use_data_before_expert_parallelism": far}
    net = tiny.model(SETTING, ep_size, mesh=Mesh(data_shard=4, data_before_expert=far))
    with opened(SETTING, ep_size, stage, net=net, **keys) as engine:
        trained(engine, SETTING)
        engine.save_16bit_model(tmp_path)
        engine.save_16bit_model(tmp_path, "whole.bin")
        state = engine._consolidated_16bit_state_dict()
        if not engine.is_main_rank:
            assert state is None
            return
        expected = tiny.in_one_process(SETTING, 4).params
        assert_close(load_file(tmp_path / "model.safetensors"), expected)
        whole = torch.load(tmp_path / "whole.bin", weights_only=True)
        one = tiny.model(SETTING, 1)
        assert list(whole) == list(state) == list(one.state_dict())
        assert_close(whole, expected)
        one.load_state_dict(whole)


@pytest.mark.parametrize("plan", [PLAN, CUT])
@on_ranks(4)
def test_experts_beside_tensor_ranks_are_written(tmp_path, plan):
    """Whole ones, and those that tensor ranks share."""
    mesh = Mesh(data_shard=2, tensor=2)
    with opened(SETTING, 2, 3, mesh=mesh, plan=plan) as engine:
        engine.save_16bit_model(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert_close(found, dict(tiny.model(SETTING, 1).named_parameters()))


@on_ranks(4)
def test_experts_of_replicas_are_written_once(tmp_path):
    with opened(SETTING, 2, 3, mesh=Mesh(data_replicate=2, data_shard=2)) as engine:
        engine.save_16bit_model(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert_close(found, dict(tiny.model(SETTING, 1).named_parameters()))


@on_ranks(4)
def test_the_files_of_an_export_have_the_limit_of_their_size(tmp_path):
    with opened(SETTING, 4, 3) as engine:
        engine.save_pretrained(tmp_path, max_shard_size="20KB")
        files = sorted(tmp_path.glob("*.safetensors"))
        assert len(files) > 2
        found = {name: t for file in files for name, t in load_file(file).items()}
        assert_close(found, dict(tiny.model(SETTING, 1).named_parameters()))


class Scaled(nn.Module):
    """An expert with buffers of both kinds: a factor of its own, and how many rows it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("factor", torch.rand(WIDTH) + 0.5)
        self.register_buffer("hidden", torch.rand(()) + 0.5, persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x[..., 0].numel()
        return self.line(x) * self.factor * self.hidden


class Layers(nn.Module):
    """``sizes``: how many ranks share the experts of each layer."""

    def __init__(self, sizes: tuple[int, int]) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.rand(WIDTH))
        self.layers = nn.ModuleList(
            MoE(WIDTH, Scaled, 4, size, k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
            for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(x) + self.offset
        for layer in self.layers:
            x = layer(x)[0]
        return x


def layers(*sizes: int) -> Layers:
    torch.manual_seed(3)
    return Layers(sizes).double()


def inputs(step: int) -> Tensor:
    """``[ranks, tokens, width]`` of a step."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, WIDTH, generator=draw, dtype=torch.float64)


def open_layers(sizes: tuple[int, int], stage: int) -> zeroshard.Engine:
    keys = config(stage, optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}})
    engine, *_ = zeroshard.initialize(model=layers(*sizes), config=keys)
    return engine


def train(engine: zeroshard.Engine, steps: range) -> None:
    for step in steps:
        own = inputs(step)[engine.dp_rank :: engine.dp_size]
        engine.backward(engine(own).square().mean())
        engine.step()


def in_one_process(steps: int) -> dict[str, Tensor]:
    net = layers(1, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.0)
    for step in range(steps):
        optimizer.zero_grad()
        net(inputs(step)).square().mean().backward()
        optimizer.step()
    return net.state_dict()


def without_counts(state: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in state.items() if not name.endswith("seen")}


@pytest.mark.parametrize("sizes", [(2, 4), (4, 1)])
@pytest.mark.parametrize("stage", [3, 1])
@on_ranks(4)
def test_buffers_are_those_of_the_experts_of_each_rank(sizes, stage, tmp_path):
    """Values, checkpoints and exports; layers of one model may be shared by other numbers of ranks."""
    with open_layers(sizes, stage) as engine:
        train(engine, range(2))
        engine.save_checkpoint(tmp_path, "2")
        engine.save_16bit_model(tmp_path, "w.safetensors")
        own = {name: each.clone() for name, each in engine.module.named_buffers()}
        train(engine, range(2, 3))
        engine.load_checkpoint(tmp_path, "2")
        for name, each in engine.module.named_buffers():
            assert torch.equal(each, own[name]), name
        train(engine, range(2, 3))
        engine.save_16bit_model(tmp_path, "last.safetensors")
        seen = {name: each.clone() for name, each in own.items() if name.endswith("seen")}
        dist.barrier()
        if engine.is_main_rank:
            assert len(seen) == sum(4 // size for size in sizes)
            exported = load_file(tmp_path / "w.safetensors")
            assert_close(without_counts(exported), without_counts(in_one_process(2)))
            assert all(int(exported[name]) == int(each) for name, each in seen.items())
            assert sum(int(each) for each in exported.values() if each.dtype == torch.int64) > 0
            last = load_file(tmp_path / "last.safetensors")
            assert_close(without_counts(last), without_counts(in_one_process(3)))
            with CheckpointReader(tmp_path / "2") as saved:
                export_checkpoint(saved, tmp_path / "out")
            assert_close(load_file(tmp_path / "out" / "model.safetensors"), exported)
            fp32 = get_fp32_state_dict_from_zero_checkpoint(tmp_path, "2")
            assert fp32.keys() == exported.keys()


@on_ranks(2)
def test_another_number_of_ranks_gets_the_buffers(tmp_path):
    with open_layers((2, 1), 3) as engine:
        train(engine, range(1))
        engine.save_checkpoint(tmp_path, "1")
        engine.save_16bit_model(tmp_path, "w.safetensors")
    with open_layers((1, 2), 1) as engine:
        for buffer in engine.module.buffers():
            buffer.zero_()
        engine.load_checkpoint(tmp_path, "1")
        saved = load_file(tmp_path / "w.safetensors")
        for name, buffer in engine.module.state_dict().items():
            if not name.endswith(("weight", "bias")):
                assert torch.equal(buffer, saved[name]) or name.endswith("seen"), name


@on_ranks(2)
def test_the_record_of_a_run_has_the_number_of_expert_ranks(tmp_path):
    with opened(Setting(depth=1), 2, 1, trust={"dump_dir": str(tmp_path)}) as engine:
        trained(engine, Setting(depth=1), 1)
    if engine.is_main_rank:
        (path,) = tmp_path.rglob("steps-*.jsonl")
        assert read_record(path).first["mesh"]["expert"] == 2


def test_names_come_in_the_order_of_places():
    """Two layers, of 2 and 4 ranks. Ranks that share nothing with rank 0 tell nothing."""

    def told(rank: int) -> _Told:
        if rank > 3:
            return _Told({}, [], [])
        units = {"a": (4, [[f"a{rank}"]])} | ({"b": (2, [[f"b{rank}", "t"]])} if rank < 2 else {})
        rows = [(f"c{rank}", "float32", (2,), 4)]
        return _Told(units, [(2, [f"b{rank}"]), (4, [f"a{rank}", f"c{rank}"])], rows)

    units, buffers, after = united_of([told(rank) for rank in range(8)], Mesh(data_shard=8))
    assert units == {
        "a": [[["a0"]], [["a1"]], [["a2"]], [["a3"]]],
        "b": [[["b0", "t"]], [["b1", "t"]]],
    }
    assert after == {"b0": ["b1"], "c0": ["a1", "c1", "a2", "c2", "a3", "c3"]}
    assert [(row.name, row.place) for row in buffers] == [(f"c{at}", at) for at in range(4)]
