"""Ranks of topologies, compared with arithmetic on their numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from zeroshard.core.mesh import Mesh
from zeroshard.deepspeed import groups, topology
from zeroshard.deepspeed.groups import MeshGroups
from zeroshard.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    mesh_of,
)
from zeroshard.errors import UsageError

SHAPES = [(pp, mp, dp) for pp, mp, dp in product(range(1, 25), repeat=3) if pp * mp * dp <= 24]


def test_a_table_for_twelve_ranks() -> None:
    """Three stages, two data-parallel ranks, two tensor-parallel ranks; the table was written by hand."""
    grid = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=2)
    #       stage  0     1     2
    table = {  # (data, model): ranks of the pipeline
        (0, 0): [0, 4, 8],
        (0, 1): [1, 5, 9],
        (1, 0): [2, 6, 10],
        (1, 1): [3, 7, 11],
    }
    assert grid.get_axis_names() == ["pipe", "data", "model"]
    assert grid.get_axis_comm_lists("pipe") == list(table.values())
    assert grid.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert grid.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    for (data, model), ranks in table.items():
        assert [grid.get_rank(pipe=at, data=data, model=model) for at in range(3)] == ranks
    assert grid.filter_match(pipe=1, model=0) == [4, 6]
    assert grid.filter_match() == list(range(12))
    assert grid.get_axis_list("data", 1) == [2, 3, 6, 7, 10, 11]
    assert tuple(grid.get_coord(7)) == (1, 1, 1)
    assert [grid.get_dim(axis) for axis in ("pipe", "data", "model", "expert")] == [3, 2, 2, 0]
    assert [grid.get_rank_repr(rank) for rank in (0, 5)] == ["model_00", "model_01"]
    assert grid.get_rank_repr(7, omit_axes=["data"]) == "pipe_01-model_01"
    assert (
        grid.get_rank_repr(7, omit_axes=[], inner_sep="", outer_sep=".") == "pipe01.data01.model01"
    )
    assert grid.get_axis_comm_lists("expert") == []
    assert grid.mapping[grid.get_coord(3)] == 3
    assert str(grid).startswith("{ProcessCoord(pipe=0, data=0, model=0): 0, ")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranks_follow_from_the_sizes(shape: tuple[int, int, int]) -> None:
    pp, mp, dp = shape
    grid = PipeModelDataParallelTopology(num_pp=pp, num_mp=mp, num_dp=dp)
    ranks = range(pp * mp * dp)
    assert grid.world_size() == len(ranks)
    for rank in ranks:
        at = grid.get_coord(rank)
        stage, data, model = rank // (dp * mp), rank // mp % dp, rank % mp
        assert (at.pipe, at.data, at.model) == (stage, data, model)
        assert grid.get_rank(pipe=stage, data=data, model=model) == rank
        assert grid.get_rank_repr(rank) == f"model_{model:02d}"
        assert grid.get_rank_repr(rank, omit_axes=["model"]) == f"pipe_{stage:02d}-data_{data:02d}"
        assert grid.filter_match(pipe=stage, data=data, model=model) == [rank]
    strides = {"pipe": (pp, dp * mp), "data": (dp, mp), "model": (mp, 1)}
    for axis, (size, stride) in strides.items():
        first = [rank for rank in ranks if rank // stride % size == 0]
        assert grid.get_dim(axis) == size
        assert grid.get_axis_comm_lists(axis) == [
            [rank + index * stride for index in range(size)] for rank in first
        ]
        for index in range(size):
            expected = [rank for rank in ranks if rank // stride % size == index]
            assert grid.get_axis_list(axis, index) == grid.filter_match(**{axis: index}) == expected
    mesh = mesh_of(grid)
    assert mesh == Mesh(pipeline=pp, data_shard=dp, tensor=mp)
    assert grid.get_axis_comm_lists("model") == [list(group) for group in mesh.groups({"tensor"})]
    assert grid.get_axis_comm_lists("pipe") == [list(group) for group in mesh.groups({"pipeline"})]


@pytest.mark.parametrize("pp", range(1, 7))
@pytest.mark.parametrize("dp", range(1, 5))
def test_two_axes(pp: int, dp: int) -> None:
    grid = PipeDataParallelTopology(num_pp=pp, num_dp=dp)
    assert (grid.axes, grid.dims) == (["pipe", "data"], [pp, dp])
    assert [tuple(grid.get_coord(rank)) for rank in range(pp * dp)] == [
        (rank // dp, rank % dp) for rank in range(pp * dp)
    ]
    assert {grid.get_rank_repr(rank) for rank in range(pp * dp)} == {""}


def test_axes_may_have_any_names() -> None:
    grid = ProcessTopology(axes=["node", "gpu", "x", "y"], dims=[2, 1, 2, 3])
    assert grid.get_coord(11)._asdict() == {"node": 1, "gpu": 0, "x": 1, "y": 2}
    assert grid.get_axis_comm_lists("x")[-1] == [8, 11]
    assert grid.get_axis_comm_lists("gpu") == [[rank] for rank in range(12)]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ProcessTopology(["a"], [2, 2]), "one size for each axis"),
        (lambda: ProcessTopology(["a", "a"], [2, 2]), "no axis twice"),
        (lambda: ProcessTopology(["a"], [0]), r"at least 1, not \[0\]"),
        (lambda: grid().get_rank(pipe=0), "needs one position on each of the axes"),
        (lambda: grid().get_rank(pipe=0, data=0, model=0, x=1), "needs one position"),
        (lambda: grid().get_rank(pipe=2, data=0, model=0), "is outside the sizes"),
        (lambda: grid().get_coord(8), "rank 8 is not one of 8 ranks"),
        (lambda: grid().get_coord(-1), "rank -1 is not one of 8 ranks"),
        (lambda: mesh_of(ProcessTopology(["data", "pipe"], [2, 2])), "Give them in this order"),
        (lambda: mesh_of(ProcessTopology(["rows"], [2])), "pipe, data and model"),
        (lambda: PipelineParallelGrid(grid()), "has 8 ranks .* but the process group has 1"),
    ],
)
def test_wrong_calls(call: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        call()


def grid() -> ProcessTopology:
    return PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)


def test_one_rank_is_a_grid() -> None:
    alone = PipelineParallelGrid()
    assert alone.get_global_rank() == alone.get_stage_id() == alone.get_model_parallel_rank() == 0
    assert alone.topology().dims == [1, 1, 1]
    assert alone.p2p_groups == [[0, 0]]
    assert alone.get_slice_parallel_group() is None


@pytest.mark.parametrize("rank", range(12))
def test_a_grid_answers_from_its_topology(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "get_rank", lambda: rank)
    monkeypatch.setattr(topology, "get_world_size", lambda _group: 12)
    monkeypatch.setattr(MeshGroups, "open", lambda mesh: MeshGroups(mesh, rank))
    axes = PipeModelDataParallelTopology(num_pp=3, num_mp=2, num_dp=2)
    made = PipelineParallelGrid(axes)
    stage, data, model = rank // 4, rank // 2 % 2, rank % 2
    assert made.get_stage_id() == made.stage_id == made.get_pipe_parallel_rank() == stage
    assert made.get_data_parallel_rank() == made.data_parallel_id == data
    assert made.get_slice_parallel_rank() == model
    assert made.get_model_parallel_rank() == 2 * stage + model
    assert (made.get_pipe_parallel_world_size(), made.get_data_parallel_world_size()) == (3, 2)
    assert (made.get_slice_parallel_world_size(), made.get_model_parallel_world_size()) == (2, 6)
    assert (made.pipe_parallel_size, made.model_parallel_size, made.is_slice_parallel) == (
        3,
        2,
        True,
    )
    assert [made.stage_to_global(at) for at in range(3)] == [rank % 4 + 4 * at for at in range(3)]
    assert made.stage_to_global(2, data=0, model=1) == 9
    assert made.p2p_groups == [[one, (one + 4) % 12] for one in range(12)]
    assert made.topology() is axes


def test_the_mesh_of_a_default_group_that_is_gone_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = (object(), MeshGroups(Mesh(tensor=4), 0))
    monkeypatch.setattr(groups, "_current", [gone])
    assert groups.current().mesh == Mesh(data_shard=1)
    assert groups.mpu is None


@pytest.mark.parametrize("rank", range(8))
def test_groups_of_a_mesh_answer_as_an_mpu(rank: int) -> None:
    mesh = Mesh(pipeline=2, data_shard=2, tensor=2)
    found = MeshGroups(mesh, rank)
    assert found.get_tensor_model_parallel_world_size() == 2
    assert found.get_model_parallel_rank() == rank % 2
    assert found.get_data_parallel_rank() == rank // 2 % 2
    assert found.get_pipe_parallel_rank() == rank // 4
    assert found.get_sequence_parallel_world_size() == 1
    assert found.get_sequence_data_parallel_world_size() == 2
    assert found.get_expert_data_parallel_rank() == found.get_data_parallel_rank()
    assert (found.get_expert_parallel_world_size(), found.get_expert_parallel_rank()) == (1, 0)
