"""State that early updates may have changed is settled by every way to it."""

from __future__ import annotations

from typing import Any

import pytest

from zeroshard.zero.optimizer_object import SettledState

WAYS: dict[str, Any] = {
    "state[key]": lambda state: state["key"],
    "get": lambda state: state.get("key"),
    "setdefault": lambda state: state.setdefault("key", {}),
    "values": lambda state: list(state.values()),
    "items": lambda state: list(state.items()),
    "copy": lambda state: state.copy(),
    "pop": lambda state: state.pop("key"),
    "popitem": lambda state: state.popitem(),
    "state[key] = ...": lambda state: state.__setitem__("key", {}),
    "del": lambda state: state.__delitem__("key"),
    "clear": lambda state: state.clear(),
    "update": lambda state: state.update(key={}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_settles_first(way: str) -> None:
    state = SettledState(dict, {"key": {"exp_avg": 1}})
    settled: list[bool] = []
    state.settle = lambda: settled.append("key" in state and state.keys() == {"key"})
    WAYS[way](state)
    assert settled[0]


def test_the_optimizer_own_lookup_settles_nothing() -> None:
    state = SettledState(dict, {"key": {}})
    state.settle = lambda: pytest.fail("settled")
    assert dict.get(state, "key") == {}
