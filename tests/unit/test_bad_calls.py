"""Every wrong call raises an exception of ``zeroshard.errors`` with the right text."""

from __future__ import annotations

import traceback

import pytest
from call_cases import CASES, Case
from config_cases import CASES as CONFIG_CASES
from torch import nn

import zeroshard
from zeroshard.errors import ConfigError, ZeroShardError


def says(text: str, expected: str) -> bool:
    """``expected`` ending in "..." is a beginning."""
    head = expected.removesuffix("...")
    return text.startswith(head) if head != expected else text == expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_call_is_answered_with_its_message(case: Case) -> None:
    with pytest.raises(ZeroShardError) as caught:
        case.call()
    assert type(caught.value) is case.error
    assert says(str(caught.value), case.text), str(caught.value)


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_there_are_enough_of_them() -> None:
    assert len(CASES) >= 25
    assert len(CASES) + len(CONFIG_CASES) >= 60


def test_a_mistake_in_a_configuration_is_shown_with_one_frame_of_the_library() -> None:
    with pytest.raises(ConfigError, match="optimizr: no such key") as caught:
        zeroshard.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2, "optimizr": 1})
    own = [frame for frame in traceback.extract_tb(caught.tb) if "zeroshard" in frame.filename]
    assert [frame.name for frame in own if "/src/" in frame.filename] == ["initialize"]
