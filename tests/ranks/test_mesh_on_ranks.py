"""Meshes of four ranks: what torch's objects say, and process groups under DeepSpeed's names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from zeroshard_testing import on_ranks

from zeroshard import deepspeed, initialize
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.core.mesh import BATCH, Mesh
from zeroshard.core.mesh_sources import resolve_mesh
from zeroshard.deepspeed import groups
from zeroshard.deepspeed.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from zeroshard.errors import ConfigError, UsageError

TWO_BY_TWO = Mesh(data_shard=2, tensor=2)
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def summed(group: object) -> int:
    """The sum of the ranks of a process group, by a collective."""
    rank = torch.tensor(dist.get_rank())
    dist.all_reduce(rank, group=group)
    return int(rank)


@on_ranks(4)
def test_device_meshes_and_parameters_are_read() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh["tp"], [Shard(0)]))
    for sources in (
        mesh_sources(mesh=mesh),
        mesh_sources(mesh=mesh["tp"]),
        mesh_sources(model=model),
        mesh_sources(mesh=mesh, mesh_param=(2, 1), model=model),
    ):
        assert resolve_mesh(sources, 4).mesh == TWO_BY_TWO
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    with pytest.raises(
        UsageError, match=r"\[\[0, 1\], \[2, 3\]\] along tensor and .* has \[\[0, 2\]"
    ):
        resolve_mesh(mesh_sources(mesh=other), 4)
    with pytest.raises(UsageError, match=r"other order|in the order pipeline"):
        resolve_mesh(mesh_sources(mesh=other["tp"]), 4)


@on_ranks(4)
def test_an_engine_takes_a_mesh_of_data_parallel_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    engine, *_ = initialize(model=nn.Linear(2, 2), config=CONFIG, mesh=mesh)
    assert engine.loaded.mesh.mesh == Mesh(data_shard=4)
    assert engine.loaded.origins["parallel.data_shard"] == "'dp' of mesh="
    assert engine.train_batch_size() == 4
    engine(torch.ones(1, 2)).sum().backward()
    engine.step()
    engine.close()
    engine, *_ = initialize(model=nn.Linear(2, 2), config=CONFIG, mesh_param=(4, 1))
    engine.close()
    with pytest.raises(
        ConfigError, match=r"'dp' of mesh= is 4, but mesh_param\[0\] is 2; both give"
    ):
        initialize(model=nn.Linear(2, 2), config=CONFIG, mesh=mesh, mesh_param=(2, 1))


@on_ranks(4)
def test_groups_of_a_mesh_are_process_groups() -> None:
    rank = dist.get_rank()
    assert deepspeed.utils.groups.mpu is None
    found = groups.use(TWO_BY_TWO)
    assert deepspeed.utils.groups.mpu is found
    assert summed(groups._get_tensor_model_parallel_group()) == (1 if rank < 2 else 5)
    assert summed(groups._get_data_parallel_group()) == (2 if rank % 2 == 0 else 4)
    assert summed(groups._get_sequence_parallel_group()) == rank  # not all ranks, as with None
    assert summed(groups._get_sequence_data_parallel_group()) == (2 if rank % 2 == 0 else 4)
    assert groups._get_data_parallel_world_size() == groups._get_model_parallel_world_size() == 2
    assert groups._get_model_parallel_rank() == rank % 2
    assert groups._get_broadcast_src_rank() == rank % 2
    again = groups.MeshGroups.open(TWO_BY_TWO)
    assert again.group(BATCH) is found.group(BATCH)
    assert resolve_mesh(mesh_sources(mpu=found), 4).mesh == TWO_BY_TWO
    groups.use(Mesh(data_shard=4))
    assert groups._get_data_parallel_world_size() == 4
    assert groups._get_tensor_model_parallel_group() is None


@on_ranks(8)
def test_groups_of_experts_are_process_groups() -> None:
    """For each number of ranks that a layer may share its experts among, not only for the mesh's."""
    rank = dist.get_rank()
    groups.use(Mesh(data_replicate=2, data_shard=4, expert=4))
    for name, size in (("", 4), ("ep_size_4", 4), ("ep_size_2", 2), ("ep_size_1", 1)):
        shared = range(rank - rank % size, rank - rank % size + size)
        assert summed(groups._get_expert_parallel_group(name)) == sum(shared), name
        assert groups._get_expert_parallel_world_size(name) == size
        same = range(8) if size == 1 else [r for r in range(8) if r % size == rank % size]
        assert summed(groups._get_expert_data_parallel_group(name)) == sum(same), name
        assert groups._get_expert_data_parallel_world_size(name) == len(same)
        assert groups._get_expert_data_parallel_rank(name) == list(same).index(rank)
    groups.use(Mesh(data_shard=8))
    assert summed(groups._get_expert_parallel_group()) == rank
    for ask in (groups._get_expert_parallel_group, groups._get_expert_data_parallel_group):
        with pytest.raises(UsageError, match="no process group of 2 ranks that share experts"):
            ask("ep_size_2")


@on_ranks(4)
def test_a_grid_makes_its_groups_and_is_an_mpu() -> None:
    rank = dist.get_rank()
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    assert (grid.get_stage_id(), grid.get_slice_parallel_rank()) == divmod(rank, 2)
    assert grid.get_data_parallel_world_size() == 1
    assert grid.get_data_parallel_rank() == 0
    assert (grid.get_model_parallel_world_size(), grid.get_model_parallel_rank()) == (4, rank)
    assert summed(grid.get_pipe_parallel_group()) == (2 if rank % 2 == 0 else 4)
    assert summed(grid.get_slice_parallel_group()) == (1 if rank < 2 else 5)
    assert summed(grid.get_model_parallel_group()) == 6
    assert summed(grid.get_data_parallel_group()) == rank
    assert grid.stage_to_global(1) == 2 + rank % 2
    assert grid.p2p_groups == [[0, 2], [1, 3], [2, 0], [3, 1]]
    mesh = Mesh(pipeline=2, tensor=2)
    assert resolve_mesh(mesh_sources(mpu=grid), 4).mesh == mesh


@on_ranks(4)
def test_the_mesh_of_a_split_model_is_found() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    model = parallelize_module(model, tensor, ColwiseParallel())
    config = {**CONFIG, "parallel": {"tensor": 2}, "zero_optimization": {"stage": 1}}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert engine.mesh == TWO_BY_TWO
    assert (engine.mp_world_size, engine.dp_world_size, engine.train_batch_size()) == (2, 2, 2)
    assert engine.get_data_parallel_rank() == rank // 2
    assert engine.get_model_parallel_rank() == engine.mpu.get_model_parallel_rank() == rank % 2
    assert summed(engine.data_parallel_group) == (2 if rank % 2 == 0 else 4)
    engine.backward(engine(torch.full((1, 4), 1.0 + rank // 2)).sum())
    engine.step()
    assert engine.global_steps == 1
    engine.destroy()
    with pytest.raises(ConfigError, match=r"parallel.tensor is 4, but 'tp' of the device mesh of"):
        initialize(
            model=parallelize_module(nn.Linear(4, 4), tensor, ColwiseParallel()),
            config={**CONFIG, "parallel": {"tensor": 4}},
        )


@on_ranks(2)
def test_a_key_of_deepspeed_cuts_a_model_that_can_be_cut() -> None:
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2}}
    with pytest.raises(UsageError, match="Linear"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    with pytest.raises(
        UsageError,
        match=r"the mesh is tensor 2 \(tensor: config\), but no parameter of the model is cut "
        r'over tensor ranks.* Write "tensor_parallel": \{"autotp_size": 2\} in the configuration',
    ):
        deepspeed.initialize(model=nn.Linear(2, 2), config={**CONFIG, "parallel": {"tensor": 2}})
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(2)]
    model = nn.Sequential(*blocks)
    cut = deepspeed.tp_model_init(model, 2, torch.float32)
    engine, *_ = deepspeed.initialize(model=cut, config=config)
    assert engine.mesh == Mesh(tensor=2)
    engine.destroy()


@on_ranks(4)
def test_all_ranks_raise_the_same_error_before_any_collective() -> None:
    model, texts = nn.Linear(2, 2), []
    shuffled = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    for arguments in (
        {"mesh": shuffled},
        {"mesh": Mesh(data_shard=2)},
        {"mesh_param": (3, 1)},
        {"mesh_param": "four"},
        {"config": {**CONFIG, "parallel": {"tensor": 8}}},
    ):
        with pytest.raises((ConfigError, UsageError)) as caught:
            initialize(model=model, **{"config": CONFIG, **arguments})
        texts.append(f"{type(caught.value).__name__}: {caught.value}")
    everyone: list = [None] * 4
    dist.all_gather_object(everyone, texts)
    assert everyone == [texts] * 4


@on_ranks(2)
def test_an_engine_answers_from_its_mesh() -> None:
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)
    assert engine.mpu is None
    assert engine.mp_world_size == 1
    assert engine.dp_world_size == 2
    assert engine.data_parallel_group is dist.group.WORLD
    assert engine.get_sequence_parallel_group() is None
    engine.destroy()
    passed = groups.MeshGroups.open(Mesh(data_shard=2))
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG, mpu=passed)
    assert engine.mpu is passed
    engine.destroy()
