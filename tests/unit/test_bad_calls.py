"""Every wrong call raises an exception of ``zeroshard.errors`` with the right text."""

from __future__ import annotations

import pytest
from call_cases import CASES, Case
from config_cases import CASES as CONFIG_CASES

from zeroshard.errors import ZeroShardError


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
