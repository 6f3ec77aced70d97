"""Ranks that have built different models are told of the first parameter that differs."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from kit import engine
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard.errors import RankMismatch


def in_order(names: str) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in names})


def frozen() -> nn.Module:
    model = in_order("ab")
    model["a"].weight.requires_grad_(False)
    return model


UNLIKE = {
    "order": (lambda: in_order("ab"), lambda: in_order("ba"), "parameter 1 = a.weight [4, 4]"),
    "names": (lambda: in_order("ab"), lambda: in_order("ac"), "parameter 3 = b.weight [4, 4]"),
    "shape": (lambda: nn.Linear(4, 3), lambda: nn.Linear(4, 2), "parameter 1 = weight [3, 4]"),
    "one more": (lambda: in_order("ab"), lambda: in_order("abc"), "parameter 5 = none"),
    "frozen": (lambda: in_order("ab"), frozen, "parameter 1 = a.weight [4, 4], float32, in unit"),
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("unlike", UNLIKE)
@on_ranks(2)
def test_unlike_models_are_refused_before_anything_is_sent(unlike, stage):
    mine, others, said = UNLIKE[unlike]
    with pytest.raises(RankMismatch) as found:
        engine(others() if dist.get_rank() else mine(), stage)
    assert f"rank 1 has another plan than rank 0. First difference: {said}" in str(found.value)
    assert "build the model in the same order" in str(found.value)
