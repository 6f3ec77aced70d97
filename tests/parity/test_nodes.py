"""Shard groups over several nodes train as one plain process does, with every kind of shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from compare import STAGES
from kit import config
from support import edge_case_models
from support.covering import each_value
from support.nodes import KEYS, opened, step
from support.parity import (
    adamw,
    assert_bit_equal,
    assert_close_trajectory,
    engine_run,
    make_batches,
    reference_run,
)
from support.tensor_models import PLANS, loss_of, tiny_gpt, tokens
from torch.distributed.device_mesh import init_device_mesh
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.core.mesh import Mesh
from zeroshard.parallel.tensor_plan import tensor_parallel


def run(name, stage, keys, *, accumulation=1, clip=0.1, precision="fp64", **more):
    case = edge_case_models.CASES[name]
    batches = make_batches(case, steps=3, world=dist.get_world_size(), accumulation=accumulation)
    zero = {"zero_optimization": {"stage": stage, **KEYS[keys]}}
    return engine_run(
        case, adamw(), batches, stage=stage, clip=clip, precision=precision, config=zero, **more
    )


def plain(name, *, accumulation=1, clip=0.1, precision="fp64"):
    case = edge_case_models.CASES[name]
    batches = make_batches(case, steps=3, world=dist.get_world_size(), accumulation=accumulation)
    return reference_run(case, adamw(), batches, clip=clip, precision=precision)


TRAININGS = (
    *(("transformer", 1), ("transformer", 3), ("experts", 1), ("tied", 1)),
    *(("checkpointed", 2), ("lora", 1)),
)


@pytest.mark.parametrize(
    ("name", "accumulation", "stage", "keys"),
    each_value(
        [
            (*training, stage, keys)
            for training in TRAININGS
            for stage in STAGES
            for keys in KEYS
            if stage == 3 or keys != "hpz"
        ]
    ),
)
@on_ranks(4)
def test_two_nodes_of_two_ranks_equal_one_plain_process(name, accumulation, stage, keys):
    found = run(name, stage, keys, accumulation=accumulation)
    expected = plain(name, accumulation=accumulation)
    assert_close_trajectory(found, expected, rtol=1e-12)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-14 * accumulation)
    assert min(found.grad_norms) > 0.1  # clipping is active
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, found)
    for other in everyone[1:]:
        assert_bit_equal(other, everyone[0])


@pytest.mark.parametrize("inner", [2, 3])
@on_ranks(6)
def test_nodes_of_other_sizes_equal_one_plain_process(inner):
    case = edge_case_models.CASES["transformer"]
    batches = make_batches(case, steps=3, world=6)
    zero = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": inner}}
    found = engine_run(case, adamw(), batches, stage=3, clip=0.1, precision="fp64", config=zero)
    expected = reference_run(case, adamw(), batches, clip=0.1, precision="fp64")
    assert_close_trajectory(found, expected, rtol=1e-12)


@on_ranks(8)
def test_nodes_beside_tensor_ranks_train_as_one_process():
    plain, model = tiny_gpt(tied=True), tiny_gpt(tied=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    grid = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, grid, PLANS["vocabulary"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    keys = config(3, gradient_clipping=0.05)
    keys["zero_optimization"]["zero_hpz_partition_size"] = 2
    mesh = Mesh(data_shard=4, tensor=2)
    with zeroshard.Engine(model, config=keys, optimizer=optimizer, mesh=mesh) as engine:
        assert engine._watch.gathers.ranks == tuple(range(dist.get_rank() % 2, 8, 2))
        for at in range(3):
            batches = [tokens(10 * at + rank) for rank in range(4)]
            for ids, labels in batches:
                (loss_of(plain(ids), labels) / 4).backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            reference.step()
            reference.zero_grad()
            ids, labels = batches[engine.dp_rank]
            engine.backward(loss_of(engine(ids), labels))
            engine.step()
            assert engine.last_step.grad_norm == pytest.approx(norm.item(), rel=1e-14)
        own = {name: full.detach().clone() for name, full in engine.iter_full_params()}
    for name, param in plain.named_parameters():
        assert (own[name] - param).abs().max() <= 1e-12 * param.abs().max(), name


# -- traffic -----------------------------------------------------------------------------------------


def sent_in_second_step(engine, micro_batches=1):
    """Elements that this rank sends to its node and to the other node, by operation."""
    step(engine, 0, micro_batches)
    recorders = {r.group.split()[0]: r for r in engine._watch.recorders}
    for unit in engine.runtime.units:
        unit.wait_for_unshard()
    for recorder in recorders.values():
        recorder.reset_traffic()
    step(engine, 1, micro_batches)
    for unit in engine.runtime.units:
        unit.wait_for_unshard()
    return [
        {op: recorders[hop].sent_numel[op] for op in ("all_gather", "reduce_scatter")}
        for hop in ("node", "nodes")
    ]


@pytest.mark.parametrize(
    ("keys", "stage", "micro_batches"),
    [("two hops", 0, 1), ("two hops", 1, 1), ("two hops", 3, 1), ("hpz", 3, 1), ("hpz", 3, 2)],
)
@on_ranks(4)
def test_a_step_sends_on_each_link_what_the_two_hops_must(keys, stage, micro_batches):
    with opened(stage, keys, gradient_accumulation_steps=micro_batches) as engine:
        units = [unit.layout.full_numel for unit in engine.runtime.units]
        node, nodes = sent_in_second_step(engine, micro_batches)
        N, M, S = sum(units), sum(units) // 2, sum(units) // 4
        first = (
            units[0] // 2 if stage == 3 else 0
        )  # forward and backward; the last unit stays whole
        reductions = micro_batches if stage == 3 else 1
        assert node["reduce_scatter"] == reductions * (N - M)
        assert nodes["reduce_scatter"] == reductions * (M - S)
        if stage < 3:
            assert (node["all_gather"], nodes["all_gather"]) == (N - M, M - S)
            return
        assert node["all_gather"] == micro_batches * (N - M + first)
        # hpZ: once per step. Else in every gather.
        again = 0 if keys == "hpz" else units[0] // 4
        assert nodes["all_gather"] == M - S + again
