"""A wrong call raises the same error on every rank, without waiting."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from zeroshard_testing import on_ranks

from zeroshard.errors import ZeroShardError

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from call_cases import CASES
from test_bad_calls import says


@pytest.mark.parametrize("number", range(len(CASES)), ids=[case.name for case in CASES])
@on_ranks(2)
def test_every_rank_gets_the_same_message(number):
    case = CASES[number]
    with pytest.raises(ZeroShardError) as caught:
        case.call()
    texts = [None, None]
    dist.all_gather_object(texts, f"{type(caught.value).__name__}: {caught.value}")
    assert texts[0] == texts[1]
    assert type(caught.value) is case.error
    assert says(str(caught.value), case.text)
