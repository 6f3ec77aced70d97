"""Which modules are gathered apart: blocks by pattern or by themselves, and large single modules."""

from __future__ import annotations

import pytest
from torch import nn

from zeroshard.config import load_config
from zeroshard.engine.unit_plan import plan_units
from zeroshard.engine.wrapping import cut_block, plan_wrapping, whole_block_numel
from zeroshard.errors import ConfigError
from zeroshard.precision.policy import policy_from

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


def units(model: nn.Module, *, device_nbytes: int = 0, whole: bool = False, **keys):
    """The units of a model on a device, with their groups and parameters."""
    given = {"train_micro_batch_size_per_gpu": 1, "unit_min_numel": 100, "unit_max_numel": 200}
    config = load_config({**given, **keys}, world_size=2).config
    specs = plan_units(
        model,
        config,
        policy_from(config),
        None,
        num_shards=2,
        num_holders=2,
        whole=whole,
        blocks={},
        device_nbytes=device_nbytes,
    )
    return {spec.name: (spec.group, [slot.fqn for slot in spec.layout.slots]) for spec in specs}


BLOCK = {
    "layers.0": ("layers.0", ["layers.0.up.bias", "layers.0.down.bias"]),
    "layers.0.up": ("layers.0", ["layers.0.up.weight"]),
    "layers.0.down": ("layers.0", ["layers.0.down.weight"]),
}
"""A block that is gathered whole: each large matrix is a unit."""


def test_matrices_of_a_block_that_is_whole_are_units_of_one_group():
    found = units(Decoder(), block_max_numel=1000)
    assert BLOCK.items() <= found.items()
    assert found["head"] == ("", ["head.weight"])
    assert found["embed"] == ("", ["embed.weight"])
    assert found == units(Decoder(), device_nbytes=16 * 2 * 2 * 512)


def test_blocks_are_cut_where_two_do_not_fit_and_on_the_cpu():
    cut = units(Decoder())
    assert cut == units(Decoder(), device_nbytes=16 * 2 * 2 * 256)
    assert not any(group for group, _ in cut.values())
    assert cut["layers.0.up"] == ("", ["layers.0.up.weight", "layers.0.up.bias"])


def test_a_block_below_the_limit_of_a_unit_is_one_unit():
    found = units(Decoder(), block_max_numel=1000, unit_max_numel=400)
    assert found["layers.0"] == ("", [f"layers.0.{n}" for n in (
        "up.weight", "up.bias", "down.weight", "down.bias")])  # fmt: skip


def test_whole_matrices_are_not_alone():
    """An optimizer that needs them gives each rank whole ones, and a unit pads to the largest."""
    trained = units(Decoder(), block_max_numel=1000, whole=True)
    assert len(trained["layers.0"][1]) == 4
    assert not any(group for group, _ in trained.values())


@pytest.mark.parametrize(
    ("gb", "numel"),
    [(0, 0), (15.8, 2**27), (24, 2**28), (42.3, 2**29), (80, 2**30), (85, 2**30), (150, 2**31)],
)
def test_the_largest_block_that_is_whole(gb, numel):
    assert whole_block_numel(int(gb * 1e9)) == numel
    assert 2 * 2 * numel <= gb * 1e9 / 16


def test_blocks_that_are_cut_for_lack_of_memory_are_said_with_the_key_that_changes_it():
    keys = {"train_micro_batch_size_per_gpu": 1, "unit_min_numel": 100, "unit_max_numel": 200}
    config = load_config(keys, world_size=2).config
    little, enough = 16 * 2 * 2 * 256, 16 * 2 * 2 * 512
    said = cut_block(Decoder(), config, little)
    assert said.startswith("layers.0 has 364 parameters, and two such blocks")
    assert '"block_max_numel": 364 gathers it whole' in said
    assert not cut_block(Decoder(), config, enough)
    assert not cut_block(Decoder(), config, 0)
    assert not cut_block(nn.Linear(WIDTH, 1000), config, little)
    chosen = load_config({**keys, "block_max_numel": 300}, world_size=2).config
    assert not cut_block(Decoder(), chosen, little)
