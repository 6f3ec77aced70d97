"""Any dict gives a configuration or a ConfigError, never another exception."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.config import KEYS, load_config
from zeroshard.errors import ConfigError

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2**40),
    st.floats(),
    st.sampled_from(
        ["auto", "none", "cpu", "true", "8", "5e8", "bf16", "", "AdamW", "OneCycle", "RMSprop"]
    ),
    st.lists(st.one_of(st.integers(0, 3), st.text(max_size=3), st.floats()), max_size=3),
    st.dictionaries(st.sampled_from(["enabled", "type", "params", "x"]), st.booleans()),
)
PATHS = st.sampled_from([*sorted(KEYS), "optimizer.params.foo", "nonsense", "fp16.nonsense"])


def nest(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for path, value in pairs:
        *sections, name = path.split(".")
        parent = config
        for section in sections:
            inner = parent.get(section)
            parent[section] = parent = inner if isinstance(inner, dict) else {}
        parent[name] = value
    return config


def outcome(config: dict[str, Any]) -> str:
    try:
        loaded = load_config(config, world_size=2, hidden_size=8)
        return "\n".join([loaded.fingerprint(), *loaded.notices])
    except ConfigError as error:
        return str(error)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.lists(st.tuples(PATHS, VALUES), max_size=8))
def test_any_dict_gives_a_configuration_or_a_config_error(pairs: list[tuple[str, Any]]) -> None:
    config = nest([("train_batch_size", 2), *pairs])
    before = copy.deepcopy(config)
    first = outcome(config)
    assert outcome(config) == first
    assert repr(config) == repr(before)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(PATHS, VALUES)
def test_one_odd_value_never_hides_another_problem(path: str, value: Any) -> None:
    config = nest([("train_batch_size", 2), (path, value)]) | {"frobnicate": 1}
    assert "frobnicate: no such key." in outcome({"unknown_keys": "error", **config})
