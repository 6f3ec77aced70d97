"""Optimizer state inside containers as a flat table, and back."""

from __future__ import annotations

from collections import OrderedDict, deque

import pytest

from zeroshard.errors import CheckpointError
from zeroshard.optim.state_tree import flat, grown, is_keepable, nested, replace

TREES = [
    {"step": 3, "exp_avg": 1.0},
    {"buffers": {0.0: 1, 0.9: 2}},
    {"queue": deque([1, 2, 3], maxlen=5)},
    {"queue": deque([1, 2])},
    {"pair": (1, (2, 3)), "list": [[1, 2], [3]]},
    {"mixed": {"a@(b": [1], None: ({True: 5},)}, "plain": 7},
]


@pytest.mark.parametrize("state", TREES, ids=str)
def test_the_containers_can_be_made_again_from_the_names(state):
    found = nested(flat(state))
    assert found == state
    for name, value in state.items():
        assert type(found[name]) is type(value)
        assert getattr(found[name], "maxlen", 0) == getattr(value, "maxlen", 0)


def test_state_without_containers_is_not_copied():
    state = {"step": 1, "exp_avg": 2.0}
    assert flat(state) is state


def test_the_names_say_the_path():
    state = {"a": {0.9: [1]}, "b": deque([2], maxlen=4), "c": (3,), "d": OrderedDict(x=4)}
    assert list(flat(state)) == ["a@({0.9}, [0])", "b@([0, 4],)", "c@((0,),)", "d@({'x'},)"]


def test_replaced_values_are_in_their_places():
    state = {"a": {0.9: [1, 2]}, "b": (1, 2), "c": deque([1]), "d": 1}
    inner = state["a"][0.9]
    replace(state, lambda _name, value: value + 10)
    assert state == {"a": {0.9: [11, 12]}, "b": (11, 12), "c": deque([11]), "d": 11}
    assert state["a"][0.9] is inner


def test_a_queue_of_limited_length_gets_all_its_names():
    names = flat({"q": deque([1], maxlen=3), "l": [1]})
    assert grown(names) == ["q@([0, 3],)", "q@([1, 3],)", "q@([2, 3],)", "l@([0],)"]


def test_what_a_container_cannot_give_back_is_not_keepable():
    state = {"a": [None], "b": [], "c": {"x": "text"}, "d": None, "e": {object(): 1}}
    assert [n for n, v in flat(state).items() if is_keepable(n, v)] == ["d"]


@pytest.mark.parametrize(
    "names",
    [
        ["a@("],
        ["a@(1,)"],
        ["a@((),)"],
        ["a@([],)"],
        ["a@({'x'},)", "a"],
        ["a@({'x'},)", "a@([0],)"],
        ["a@([0],)", "a@(['x'],)"],
        ["a@([0, -1],)"],
        ["a@(" + "[" * 100_000],
        ["a@(__import__('os'),)"],
    ],
    ids=lambda names: " ".join(names)[:40],
)
def test_names_of_a_damaged_checkpoint_are_refused(names):
    with pytest.raises(CheckpointError, match="describe no dict, list, tuple or deque"):
        nested(dict.fromkeys(names, 1.0))
