"""Which modules are gathered apart: blocks by pattern or by themselves, and large single modules."""

from __future__ import annotations

import pytest
from torch import nn

from zeroshard.engine.unit_plan import plan_wrapping
from zeroshard.errors import ConfigError

WIDTH, WORDS = 4, 100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)


class Decoder(nn.Module):
    def __init__(self, *, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def wrapped(model: nn.Module, **keys) -> dict[str, int]:
    """The wrapped modules, and how many parameters each gathers."""
    return {plan.fqn: len(plan.params) for plan in plan_wrapping(model, **keys)}


@pytest.mark.parametrize("units", ["auto", "Block", ["layers.?"]])
def test_blocks_embedding_and_head_are_apart_and_the_rest_is_the_roots(units):
    found = wrapped(Decoder(), units=units, min_numel=100)
    assert found == {"embed": 1, "layers.0": 4, "layers.1": 4, "head": 1, "": 2}


def test_what_is_small_or_shared_stays_with_the_root():
    assert wrapped(Decoder(), units="Block", min_numel=1000) == {
        "layers.0": 4,
        "layers.1": 4,
        "": 4,
    }
    tied = wrapped(Decoder(tied=True), units="Block", min_numel=100)
    assert tied == {"layers.0": 4, "layers.1": 4, "": 3}


def test_single_modules_inside_a_pattern_are_not_apart():
    assert "layers.0.up" not in wrapped(Decoder(), units="Block", min_numel=1)
    found = wrapped(Decoder(), units=["*.up"], min_numel=100)
    assert found == {
        "embed": 1, "layers.0.up": 2, "layers.0.down": 2, "layers.1.up": 2, "layers.1.down": 2,
        "head": 1, "": 2,
    }  # fmt: skip


def test_a_module_that_only_some_ranks_run_is_never_apart():
    found = wrapped(Decoder(), units="Block", min_numel=100, conditional=["head"])
    assert found == {"embed": 1, "layers.0": 4, "layers.1": 4, "": 3}


def test_larger_blocks_are_split_into_their_children():
    found = wrapped(Decoder(), max_numel=200, min_numel=100)
    assert {"layers.0.up", "layers.0.down"} < found.keys()
    with pytest.raises(ConfigError, match="'Layer' matches no module name"):
        wrapped(Decoder(), units="Layer")
