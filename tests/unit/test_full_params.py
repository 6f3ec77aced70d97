"""The lists by which the parameters of units become full and sharded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroshard.zero.full_params import FullParams
from zeroshard.zero.sharded_parameter import ShardedParameter


def full(*shapes: tuple[int, ...]) -> FullParams:
    """Full parameters of these shapes, one after the other in one storage."""
    flat = torch.arange(sum(torch.Size(shape).numel() for shape in shapes), dtype=torch.float32)
    views, at = [], 0
    for shape in shapes:
        numel = torch.Size(shape).numel()
        views.append(flat[at : at + numel].view(shape))
        at += numel
    params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
    made = FullParams(params, views)
    made.hide()
    made.show()
    return made


def transposed(params):
    params[0].data = params[0].data.t()


def replaced(params):
    params[0].data = params[0].data.clone()


def exchanged(params):
    params[0].data, params[1].data = params[1].data, params[0].data


def a_part(params):
    params[0].data = params[0].data[1:]


@pytest.mark.parametrize(
    ("edit", "moved"),
    [(transposed, [0]), (replaced, [0]), (exchanged, [0, 1]), (a_part, [0]), (list, [])],
)
def test_parameters_with_other_memory_are_found(edit, moved):
    made = full((4, 4), (4, 4), (3,))
    edit(made.params)
    assert made.moved() == moved


def test_parameters_without_elements_are_in_their_places():
    assert full((0,), (2,)).moved() == []


def test_sharded_parameters_have_no_values_and_a_higher_version():
    made = full((4, 4), (3,))
    before = made.versions()
    made.hide()
    assert all(type(param) is ShardedParameter for param in made.params)
    assert all(new > old for new, old in zip(made.versions(), before, strict=True))
    assert made.show() == made.versions() == before
    assert all(type(param) is nn.Parameter for param in made.params)
    assert made.params[1].tolist() == [16.0, 17.0, 18.0]


def test_a_write_changes_the_version():
    made = full((3,))
    before = made.versions()
    with torch.no_grad():
        made.params[0].add_(1)
    assert made.versions() != before


def test_lists_of_several_units_are_those_of_each_in_their_order():
    parts = [full((2, 2)), full((3,), (1,))]
    joined = FullParams.of_all(parts)
    assert joined.params == (*parts[0].params, *parts[1].params)
    assert joined.versions() == (*parts[0].versions(), *parts[1].versions())
    joined.hide()
    assert [type(param) for part in parts for param in part.params] == [ShardedParameter] * 3
    assert joined.show() == joined.versions()
    assert joined.moved() == []
    assert FullParams.of_all(parts[:1]) is parts[0]
