"""Ranks that share the experts of layers train as one process does, at every stage and mesh."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import expert_models as tiny
from support.covering import each_value
from support.expert_models import Run, Setting, StarvingGate
from support.expert_runs import CUT, opened, trained
from torch import nn
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard.core.mesh import Mesh
from zeroshard.parallel import MoE, pipeline

STAGES = (0, 1, 2, 3)
UP_DOWN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def assert_equal(found: Run, expected: Run, tolerance: float = 1e-12) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=tolerance)
    assert min(found.norms) > tiny.CLIP  # clipping is active
    assert found.params.keys() <= expected.params.keys()
    assert sum("experts" in name for name in found.params)
    for name, param in found.params.items():
        torch.testing.assert_close(param, expected.params[name], rtol=0, atol=tolerance)


def check(setting: Setting, ep_size: int, stage: int, **options: Any) -> None:
    with opened(setting, ep_size, stage, **options) as engine:
        found, size = trained(engine, setting), engine.dp_size
    assert_equal(found, tiny.in_one_process(setting, size))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_two_ranks_that_share_experts_equal_one_process(stage):
    check(Setting(), 2, stage)


@pytest.mark.parametrize(
    ("setting", "ep_size", "stage"),
    each_value(
        [
            (setting, ep_size, stage)
            for setting in (
                Setting(micro=2, residual=True),
                Setting(k=1, starved=(3,), hungry=1),
                Setting(k=1, starved=(2, 3)),
                Setting(drops=True, capacity=0.6),
                Setting(k=3, drops=True, capacity=0.6),
            )
            for ep_size in (2, 4)
            for stage in (3, 0, 1, 2)
        ]
    ),
)
@on_ranks(4)
def test_four_ranks_equal_one_process(setting, ep_size, stage):
    check(setting, ep_size, stage)


def is_equal_on_replicas(run: Run) -> bool:
    """Whether all ranks that hold the same experts have the same bits. The mesh has two replicas."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, run.params)
    twin = everyone[(dist.get_rank() + len(everyone) // 2) % len(everyone)]
    return all(torch.equal(param, twin[name]) for name, param in run.params.items())


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_replicas_shard_the_experts_of_which_each_has_one_copy(stage):
    """Each rank of a replica has other experts, so the ranks that have the same are in other replicas."""
    mesh, setting = Mesh(data_replicate=2, data_shard=2), Setting(micro=2, starved=(3,), hungry=1)
    with opened(setting, 2, stage, mesh=mesh) as engine:
        comm = engine._watch.experts[2]
        assert comm.ranks == ((0, 2), (1, 3))[dist.get_rank() % 2]
        found = trained(engine, setting)
        assert is_equal_on_replicas(found)
    assert_equal(found, tiny.in_one_process(setting, 4))


@pytest.mark.parametrize(
    ("stage", "outer"), [*((stage, "bucket") for stage in STAGES), (2, "boundary"), (3, "boundary")]
)
@on_ranks(8, timeout=180)
def test_replicas_of_sharded_experts_equal_one_process(stage, outer):
    """Experts are gathered inside a replica; only their gradients are added over replicas."""
    mesh = Mesh(data_replicate=2, data_shard=4)
    setting = Setting(micro=2 if outer == "boundary" else 1, k=1, starved=(3,), hungry=1)
    zero = {"zero_optimization": {"stage": stage, "hierarchy": {"outer_reduce": outer}}}
    with opened(setting, 2, stage, mesh=mesh, **zero) as engine:
        comm = engine._watch.experts[2]
        assert (comm.size, comm.replicas) == (2, 2)
        found = trained(engine, setting)
        sent = {op for op, numel in comm.outer.recorder.sent_numel.items() if numel}
        assert sent <= {"reduce_scatter", "all_gather", "broadcast"}
        calls = comm.outer.recorder.calls
        assert calls["all_gather"] == calls["reduce_scatter"] > 0  # both of sums of gradients
        assert is_equal_on_replicas(found)
    assert_equal(found, tiny.in_one_process(setting, 8))


class Picky(nn.Sequential):
    """An expert with a parameter that gets a gradient, of zero, in the second of two replicas only."""

    def __init__(self) -> None:
        up, down = nn.Linear(tiny.WIDTH, tiny.INNER), nn.Linear(tiny.INNER, tiny.WIDTH)
        super().__init__(up, nn.GELU(), down)
        self.scale = nn.Parameter(torch.ones(tiny.WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = super().forward(x)
        return found + 0 * self.scale if StarvingGate.data_rank > 1 else found


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_a_gradient_in_one_replica_counts_in_all(stage):
    """Without a gradient weights do not decay. The two ranks with the expert are in other replicas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "make_expert", Picky)
        check(Setting(), 2, stage, mesh=Mesh(data_replicate=2, data_shard=2))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_nodes_that_hold_every_state_are_replicas_of_experts(stage):
    nodes = {"stage": stage, "hierarchy": {"inner": 2, "shard_over": "inner"}}
    check(MICRO, 2, stage, zero_optimization=nodes)


CPU = {"device": "cpu"}
MICRO = Setting(micro=2, k=1, starved=(3,), hungry=0)


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (1, {"offload_optimizer": CPU}),
        (2, {"offload_optimizer": {"device": "nvme"}}),
        (3, {"offload_optimizer": CPU, "offload_param": CPU}),
        (3, {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}),
    ],
)
@on_ranks(4)
def test_offloaded_experts_equal_one_process(stage, zero, tmp_path):
    zero = {
        part: {**where, **({"nvme_path": str(tmp_path)} if where["device"] == "nvme" else {})}
        for part, where in zero.items()
    }
    check(MICRO, 2, stage, zero_optimization={"stage": stage, **zero})


@pytest.mark.parametrize("over", ["all", "hybrid"])
@pytest.mark.parametrize("ep_size", [2, 4])
@on_ranks(4)
def test_experts_beside_nodes_equal_one_process(ep_size, over):
    """Dense units have two hops, those of experts one."""
    nodes = {"stage": 3, "hierarchy": {"inner": 2, "shard_over": over}}
    check(MICRO, ep_size, 3, zero_optimization=nodes)


@on_ranks(2)
def test_checkpointed_experts_equal_one_process():
    """Backward runs the exchange of tokens again."""
    setting = Setting(starved=(3,), hungry=0)
    with opened(setting, 2, 3) as engine:
        for block in engine.module.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        found = trained(engine, setting)
    assert_equal(found, tiny.in_one_process(setting, 2))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_sixteen_bits_are_near_one_process(precision, stage):
    setting = Setting()
    asked = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    with opened(setting, 2, stage, torch.float32, **{precision: asked}) as engine:
        found = trained(engine, setting)
    expected = tiny.in_one_process(setting, 4)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.norms == pytest.approx(expected.norms, rel=5e-2)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_experts_of_ranks_far_apart(stage):
    mesh = Mesh(data_shard=4, data_before_expert=1)
    check(Setting(), 2, stage, mesh=mesh, use_data_before_expert_parallelism=True)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_tensor_ranks_hold_whole_experts(stage):
    check(Setting(residual=True), 2, stage, mesh=Mesh(data_shard=2, tensor=2))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_tensor_ranks_share_each_expert(stage):
    setting, mesh = Setting(starved=(3,), hungry=0), Mesh(data_shard=2, tensor=2)
    with opened(setting, 2, stage, mesh=mesh, plan=CUT) as engine:
        experts = engine.module.blocks[0].moe.deepspeed_moe.experts.deepspeed_experts
        assert experts[0][0].weight.to_local().shape == (tiny.INNER // 2, tiny.WIDTH)
        found = trained(engine, setting)
    assert_equal(found, tiny.in_one_process(setting, 2))


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(4)
def test_copies_of_one_expert_need_no_mesh(stage):
    """Each rank gets the numbers that its place among the tensor ranks has."""
    setting, mesh = Setting(depth=1), Mesh(data_shard=2, tensor=2)

    def copies(setting: Setting, ep_size: int, *_: Any, **__: Any) -> nn.Module:
        net = tiny_model(setting, 1)
        gate, expert = net.blocks[0].moe.deepspeed_moe.gate, tiny.make_expert().double()
        net.blocks[0].moe = moe = MoE(
            tiny.WIDTH, expert, setting.experts, ep_size, setting.k, drop_tokens=False
        )
        moe.deepspeed_moe.gate = gate
        return net

    tiny_model = tiny.model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "model", copies)
        with opened(setting, 2, stage, mesh=mesh, net=copies(setting, 2), plan=UP_DOWN) as engine:
            found = trained(engine, setting)
        assert_equal(found, tiny.in_one_process(setting, 2))


@on_ranks(4)
def test_whole_experts_on_tensor_ranks_are_told_where_parts_were_asked_for():
    setting, mesh, told = Setting(depth=1), Mesh(data_shard=2, tensor=2), []
    net = tiny.model(setting, 2, mesh=mesh)
    net.blocks[0].moe.enable_expert_tensor_parallelism = True
    logger = logging.getLogger("zeroshard")
    logger.addFilter(lambda record: told.append(record.getMessage()) or True)
    with opened(setting, 2, 3, mesh=mesh, net=net):
        logger.filters.clear()
    assert any("holds whole experts" in text for text in told) is (dist.get_rank() == 0)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_experts_in_the_stages_of_a_pipeline(stage):
    setting, mesh = (
        Setting(micro=2, balance=0.0, starved=(1,), hungry=1),
        Mesh(pipeline=2, data_shard=2),
    )
    net = pipeline(
        tiny.model(setting, 2, mesh=mesh),
        split=["blocks.1"],
        order=["embed", "blocks", "head"],
        loss_fn=lambda logits, words: tiny.loss_of((logits, 0.0), words),
    )
    found = Run()
    with opened(setting, 2, stage, mesh=mesh, net=net) as engine:
        StarvingGate.data_rank = engine.dp_rank
        for step in tiny.batches(setting, 2):
            words = [micro[engine.dp_rank] for micro in step]
            found.losses.append(float(engine.train_batch(iter([(w, w) for w in words]))))
            found.norms.append(engine.get_global_grad_norm())
        found.params = {name: param.detach().clone() for name, param in engine.iter_full_params()}
    assert_equal(found, tiny.in_one_process(setting, 2))
