"""The arithmetic of a mesh, for random sizes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.core.mesh import BATCH, DIMS, Mesh

meshes = st.builds(Mesh, **{dim: st.integers(1, 3) for dim in DIMS})
some_dims = st.sets(st.sampled_from(DIMS)).map(frozenset)


@settings(max_examples=60, deadline=None)
@given(meshes, some_dims)
def test_groups_divide_the_ranks(mesh: Mesh, dims: frozenset[str]) -> None:
    groups = mesh.groups(dims)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    size = 1
    for dim in dims:
        size *= getattr(mesh, dim)
    assert {len(group) for group in groups} == {size}


@settings(max_examples=60, deadline=None)
@given(meshes, some_dims, st.data())
def test_members_of_a_group_differ_in_its_dimensions_only(
    mesh: Mesh, dims: frozenset[str], data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, mesh.world_size - 1))
    group = mesh.group(rank, dims)
    assert rank in group
    assert list(group) == sorted(group)
    here = mesh.coordinate(rank)
    for other in group[:8]:
        assert mesh.group(other, dims) == group
        there = mesh.coordinate(other)
        assert {dim for dim in DIMS if here[dim] != there[dim]} <= dims


@settings(max_examples=60, deadline=None)
@given(meshes)
def test_a_rank_and_its_coordinate_are_one_to_one(mesh: Mesh) -> None:
    places = [mesh.coordinate(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.world_size))
    for place in places:
        assert all(0 <= place[dim] < getattr(mesh, dim) for dim in DIMS)
    assert places == sorted(places, key=lambda place: [place[dim] for dim in DIMS])


@settings(max_examples=60, deadline=None)
@given(meshes)
def test_the_data_parallel_rank_is_the_place_in_the_data_parallel_group(mesh: Mesh) -> None:
    for rank in range(mesh.world_size):
        assert mesh.group(rank, BATCH)[mesh.dp_rank(rank)] == rank
    assert mesh.dp_size == len(mesh.group(0, BATCH))
    assert mesh.is_data_only == (mesh.dp_size == mesh.world_size)
