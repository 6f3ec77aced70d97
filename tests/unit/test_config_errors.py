"""Is every wrong configuration answered with the right words, all of them, and always the same?"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from config_cases import CASES, ONE, Case

from zeroshard.config import load_config
from zeroshard.errors import ConfigError


def message_of(config: Any, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(config, **{"world_size": 1, **kwargs})
    return str(caught.value)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_config_is_answered_with_its_message(case: Case) -> None:
    assert message_of(case.config, world_size=case.world_size) == case.message


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_config_leaves_the_callers_dict_alone(case: Case) -> None:
    before = copy.deepcopy(case.config)
    message_of(case.config, world_size=case.world_size)
    assert case.config == before


def test_the_order_of_keys_does_not_change_the_message() -> None:
    config = {"zero_optimization": {"stage": 9}, "fp16": {"enabled": "no"}, "lr": 1}
    assert message_of(config) == message_of(dict(reversed(config.items())))


def test_each_problem_stands_on_one_line() -> None:
    wrong = {**ONE, "log_level": "a\nb", "uneven": {"a": "b\nc"}, "zero\noptimization": 1}
    assert len(message_of(wrong).splitlines()) == 1 + 3


def test_a_long_value_is_cut() -> None:
    assert len(message_of({**ONE, "uneven": "x" * 5000})) < 200


def test_the_world_hint_follows_a_batch_error() -> None:
    hint = "world size is 1 because torch.distributed is not initialised, but WORLD_SIZE=8 is set"
    text = message_of({"train_batch_size": 3, "gradient_accumulation_steps": 2}, world_hint=hint)
    assert text.endswith(f"gradient_accumulation_steps 2 x world size 1 ({hint})")


def test_the_world_hint_stays_out_of_other_errors() -> None:
    assert "WORLD_SIZE" not in message_of({**ONE, "lr": 1}, world_hint="WORLD_SIZE=8 is set")


def test_a_file_is_named_in_the_heading(tmp_path: Any) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": 8, "lr": 1}')
    assert message_of(path).splitlines()[0] == f"1 problem in {path}:"


def test_unknown_keys_can_be_turned_into_notices() -> None:
    loaded = load_config({**ONE, "unknown_keys": "warn", "zero": {"stage": 3}}, world_size=1)
    assert any(line.startswith("ignored: zero: no such key.") for line in loaded.notices)


def test_refused_keys_stay_errors_when_unknown_keys_only_warn() -> None:
    assert "amp: not supported" in message_of(
        {**ONE, "unknown_keys": "warn", "amp": {"enabled": True}}
    )


def test_config_given_twice_is_an_error() -> None:
    text = "the configuration is given twice: as config= and as args.deepspeed_config; drop one"
    assert message_of({}, args_config={}) == text


def test_an_empty_world_is_an_error() -> None:
    assert message_of(ONE, world_size=0) == "world_size must be at least 1, not 0"
