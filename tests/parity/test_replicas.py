"""Replicas of a shard group train as one plain process does, and stay equal to the bit."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch
import torch.distributed as dist
from compare import STAGES
from kit import config
from support import edge_case_models
from support.covering import each_value
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
from zeroshard.comm.host import open_sockets
from zeroshard.core.mesh import Mesh
from zeroshard.errors import ConfigError
from zeroshard.parallel.tensor_plan import tensor_parallel
from zeroshard.zero import GatheredParameters, safe_get_full_grad, safe_get_full_optimizer_state

MESH = Mesh(data_replicate=2, data_shard=2)


def run(name, stage, mesh, *, accumulation=1, clip=0.1, config=None):
    case = edge_case_models.CASES[name]
    batches = make_batches(case, steps=4, world=4, accumulation=accumulation)
    return engine_run(
        case, adamw(), batches, stage=stage, clip=clip, precision="fp64", config=config, mesh=mesh
    )


def plain(name, *, accumulation=1, clip=0.1):
    case = edge_case_models.CASES[name]
    batches = make_batches(case, steps=4, world=4, accumulation=accumulation)
    return reference_run(case, adamw(), batches, clip=clip, precision="fp64")


@pytest.mark.parametrize(
    ("name", "accumulation", "stage"),
    each_value(
        [
            (*training, stage)
            for training in (("transformer", 1), ("transformer", 3), ("experts", 1), ("tied", 1))
            for stage in STAGES
        ]
    ),
)
@on_ranks(4)
def test_two_replicas_of_two_shards_equal_one_plain_process(name, accumulation, stage):
    found = run(name, stage, MESH, accumulation=accumulation)
    expected = plain(name, accumulation=accumulation)
    assert_close_trajectory(found, expected, rtol=1e-12)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-14 * accumulation)
    assert min(found.grad_norms) > 0.1  # clipping is active
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, found)
    for other in everyone[1:]:
        assert_bit_equal(other, everyone[0])


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(6)
def test_three_replicas_equal_one_group_of_all_ranks(stage):
    case = edge_case_models.CASES["transformer"]
    batches = make_batches(case, steps=2, world=6)
    runs = [
        engine_run(case, adamw(), batches, stage=stage, clip=0.1, precision="fp64", mesh=mesh)
        for mesh in (Mesh(data_replicate=3, data_shard=2), None)
    ]
    assert_close_trajectory(*runs, rtol=1e-12)


# -- an engine of two replicas of two shards -------------------------------------------------------


def opened(stage, mesh=MESH, **keys):
    torch.manual_seed(dist.get_rank())  # rank 0's parameters are used
    model = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zeroshard.Engine(model, config=config(stage, **keys), optimizer=optimizer, mesh=mesh)


def step(engine, seed=0):
    generator = torch.Generator().manual_seed(10 * seed + engine.dp_rank)
    engine.backward(engine(torch.randn(5, 16, generator=generator)).square().mean())
    engine.step()


def states_of(engine):
    """Every tensor that this rank updates."""
    shards = engine.runtime.optimizer.shards
    states = [engine.runtime.optimizer.state_of(f) for shard in shards for f in shard.fragments]
    tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    return [*tensors, *(shard.param_R for shard in shards)]


def is_equal_on_replicas(tensors):
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, [t.detach().clone() for t in tensors])
    twin = everyone[(dist.get_rank() + 2) % 4]
    return len(tensors) == len(twin) and all(map(torch.equal, tensors, twin))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_replicas_hold_equal_optimizer_state(stage):
    with opened(stage) as engine:
        for at in range(3):
            step(engine, at)
        states = states_of(engine)
        assert len(states) > 4
        assert is_equal_on_replicas(states)
        ranges = [u.layout.shard_range(u.comm.rank) for u in engine.runtime.units]
        assert ranges[0][0] == (0, 384)[dist.get_rank() % 2]
        assert (engine.dp_rank, engine.dp_size) == (dist.get_rank(), 4)


@pytest.mark.parametrize("stage", (1, 2, 3))
@on_ranks(4)
def test_a_step_sends_on_each_link_what_the_collectives_must(stage):
    with opened(stage) as engine:
        step(engine)
        N = sum(unit.layout.full_numel for unit in engine.runtime.units)
        S = N // 2
        recorders = {r.group.split()[0]: r for r in engine._watch.recorders}
        for recorder in recorders.values():
            recorder.reset_traffic()
        step(engine, 1)
        for unit in engine.runtime.units:
            unit.wait_for_unshard()
        holders, replicas = recorders["holders"], recorders["replicas"]
        assert holders.sent_numel["reduce_scatter"] == N - S
        again = engine.runtime.units[0].layout.shard_numel if stage == 3 else 0  # in backward
        assert holders.sent_numel["all_gather"] == N - S + again
        assert holders.calls["reduce_scatter"] == len(engine.runtime.units)
        sent = {op: numel for op, numel in replicas.sent_numel.items() if numel}
        assert sent == {"reduce_scatter": S / 2, "all_gather": S / 2}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_an_edit_of_one_rank_reaches_all_replicas(stage):
    with opened(stage) as engine:
        step(engine)
        params = list(engine.module.parameters())
        for source in (0, 1, 3):
            with GatheredParameters(params, modifier_rank=source), torch.no_grad():
                if dist.get_rank() == source:
                    params[0].fill_(source + 0.5)
            with GatheredParameters(params):
                assert params[0].eq(source + 0.5).all()
        step(engine, 1)
        assert is_equal_on_replicas(states_of(engine))


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_the_full_gradient_is_the_mean_over_all_replicas(stage):
    with opened(stage) as engine:
        generator = torch.Generator().manual_seed(engine.dp_rank)
        out_BD = engine(torch.randn(5, 16, generator=generator))
        own = 2 * out_BD.detach().sum(0) / out_BD.numel()  # of the last bias
        engine.backward(out_BD.square().mean())
        found = safe_get_full_grad(engine.module[2].bias)
        dist.all_reduce(own)
        assert torch.allclose(found, own / 4, rtol=1e-5)
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, found)
        assert all(torch.equal(other, found) for other in everyone)


@pytest.mark.parametrize("stage", (0, 1, 2))  # at 3 all ranks have to gather the layer
@on_ranks(4)
def test_a_gradient_that_one_rank_has_counts_everywhere(stage):
    """Only rank 3 uses the second layer. The ranks of the other replica must update it too."""
    with opened(stage) as engine:
        before = [p.clone() for _, p in engine.iter_full_params()]
        hidden_BD = engine.module[1](engine.module[0](torch.ones(5, 16)))
        used = engine.module[2](hidden_BD) if dist.get_rank() == 3 else hidden_BD
        engine.backward(used.square().mean())
        engine.step()
        after = [p for _, p in engine.iter_full_params()]
        assert all((a != b).any() for a, b in zip(after, before, strict=True))
        assert is_equal_on_replicas(states_of(engine))


@on_ranks(4)
def test_the_configuration_gives_the_number_of_replicas():
    with opened(2, mesh=None, parallel={"data_replicate": 2}) as engine:
        assert engine.mesh == MESH
        step(engine)
        assert is_equal_on_replicas(states_of(engine))


@on_ranks(4)
def test_replicas_without_shards_are_refused():
    keys = {"parallel": {"data_replicate": 4}}
    for mesh, more in ((Mesh(data_replicate=4), {}), (None, keys)):
        with pytest.raises(
            ConfigError, match="data_replicate 4 x data_shard 1: shard groups of one"
        ):
            opened(2, mesh, **more)


def values_of(engine):
    """Everything that training continues from, by name."""
    found = {name: p.detach().clone() for name, p in engine.iter_full_params()}
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key} of {name}"] = safe_get_full_optimizer_state(param, key)
    return found


def saved_numels(folder):
    """How many elements of each kind the files of a checkpoint have."""
    numels: dict[str, int] = {}
    for file in folder.glob("*/rank-*.safetensors"):
        raw = file.read_bytes()
        head = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        for key, entry in head.items():
            kind = key.split(":")[0]
            numels[kind] = numels.get(kind, 0) + math.prod(entry.get("shape", ()))
    return numels


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4)
def test_a_checkpoint_has_every_element_once_and_is_loaded_by_any_number_of_replicas(
    stage, tmp_path
):
    with opened(stage) as engine:
        for at in range(2):
            step(engine, at)
        saved = values_of(engine)
        engine.save_checkpoint(tmp_path)
        step(engine, 2)
        after = values_of(engine)
        numels = saved_numels(tmp_path)
        numel = sum(p.numel() for _, p in engine.iter_full_params())
        assert [numels[kind] for kind in ("value", "exp_avg", "exp_avg_sq")] == [numel] * 3
    for mesh in (MESH, None):
        with opened(stage, mesh) as engine:
            engine.load_checkpoint(tmp_path)
            found = values_of(engine)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)
            step(engine, 2)
            if mesh is not None:
                assert all(torch.equal(v, after[name]) for name, v in values_of(engine).items())
                assert is_equal_on_replicas(states_of(engine))


@on_ranks(4)
def test_a_closed_engine_leaves_no_socket():
    def life():
        with opened(2) as engine:
            step(engine)

    life()
    gc.collect()
    dist.barrier()
    before = len(open_sockets())
    for _ in range(3):
        life()
    gc.collect()
    assert len(open_sockets()) <= before


# -- with tensor parallelism -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", (1, 3))
@on_ranks(8)
def test_replicas_of_a_tensor_parallel_model_train_as_one_process(stage):
    plain, model = tiny_gpt(tied=True), tiny_gpt(tied=True)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    grid = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(model, grid, PLANS["vocabulary"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    keys = config(stage, gradient_clipping=0.05)
    mesh = Mesh(data_replicate=2, data_shard=2, tensor=2)
    with zeroshard.Engine(model, config=keys, optimizer=optimizer, mesh=mesh) as engine:
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
