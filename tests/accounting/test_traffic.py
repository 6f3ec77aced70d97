"""Collectives of a step transfer exactly 2Ψ, 2Ψ, 2Ψ and 3Ψ elements at stages 0 to 3.

Ψ is the number of padded elements of all units: collectives transfer padding too.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from census import WIDTH, Stack, micro_step, stack_config
from torch import nn
from torch.utils.checkpoint import checkpoint
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.core.stages import STAGES


def moved(engine: Engine) -> Counter[str]:
    """Elements per operation in one optimizer step, after a step that recorded the order of units.

    Full-size buffers are counted. The few numbers that are exchanged for the norm are not.
    """
    for step in range(2):
        engine._watch.recorder.reset_traffic()
        for _ in range(engine.accumulation.steps):
            micro_step(engine)
            engine.step()
    payload = engine._watch.recorder.payload_numel
    assert payload.pop("gather_small") < 64
    return payload


def psi(engine: Engine) -> int:
    return sum(unit.layout.full_numel for unit in engine.runtime.units)


def check_volume(config: dict, stage: int) -> None:
    with Engine(Stack(), config=config) as engine:
        payload, whole = moved(engine), psi(engine)
        volume = STAGES[stage].volume if engine.dp_size > 1 else 2  # on one rank nothing is sharded
        assert payload.total() == volume * whole
        assert payload["reduce_scatter"] == whole


@pytest.mark.smoke
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_moves_as_many_elements_as_the_paper_says(stage, world):
    from zeroshard_testing import run_ranks

    run_ranks(check_volume, world, stack_config(stage, stage3_max_reuse_distance=0), stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_small_bucket_cuts_no_unit_and_costs_no_copy(stage):
    zero = {"stage3_max_reuse_distance": 0, "reduce_bucket_size": 64}
    with Engine(Stack(), config=stack_config(stage, **zero)) as engine:
        recorder = engine._watch.recorder
        assert moved(engine)["reduce_scatter"] == psi(engine)
        calls = recorder.calls["reduce_scatter"]
        assert calls == len(engine.runtime.units)


@on_ranks(2)
def test_what_backward_needs_first_is_kept_and_not_gathered_again():
    with Engine(Stack(), config=stack_config(3)) as engine:
        payload = moved(engine)
        sizes = {unit.name: unit.layout.full_numel for unit in engine.runtime.units}
        kept = sizes["root"] + sizes["blocks.3"]
        assert payload["all_gather"] == 2 * psi(engine) - kept
        assert payload["reduce_scatter"] == psi(engine)


@pytest.mark.parametrize("live", [10**9, 0.6])
@on_ranks(2)
def test_units_that_are_reused_soon_are_kept_as_far_as_memory_allows(live):
    """Without a limit stage 3 has the traffic of stage 2. A limit bounds its memory."""
    with Engine(Stack(), config=stack_config(3)) as engine:
        limit = int(live * psi(engine)) if isinstance(live, float) else live
    zero = {"stage3_max_reuse_distance": 10**9, "stage3_max_live_parameters": limit}
    with Engine(Stack(), config=stack_config(3, **zero)) as engine:
        payload = moved(engine)
        sizes = {unit.name: unit.layout.full_numel for unit in engine.runtime.units}
        room, kept = limit - sizes["root"], sizes["root"]
        for name in ("blocks.3", "blocks.2", "blocks.1", "blocks.0"):
            room -= sizes[name]
            kept += sizes[name] if room >= 0 else 0
        assert sizes["root"] < kept
        assert (kept == psi(engine)) == (live == 10**9)
        assert payload["all_gather"] == 2 * psi(engine) - kept
        element = engine.runtime.units[0].row.param.itemsize
        transient = 2 * max(n for name, n in sizes.items() if name != "root")
        assert engine.runtime.ledger.peak("gathered") <= (limit + transient) * element


@pytest.mark.parametrize(("distance", "kept"), [(0, 0), (1, 1), (2.0, 2), (4.0, 3), (3.9, 2)])
@on_ranks(2)
def test_the_distance_to_backward_decides_what_is_kept(distance, kept):
    """Between a block's forward and its backward, the later blocks run twice. Blocks are equal here."""
    with Engine(Stack(), config=stack_config(3)) as engine:
        block = {u.name: u.layout.full_numel for u in engine.runtime.units}["blocks.3"]
    numel = int(distance * block) if isinstance(distance, float) else distance
    zero = {"stage3_max_reuse_distance": numel}
    with Engine(Stack(), config=stack_config(3, **zero)) as engine:
        payload = moved(engine)
        sizes = {unit.name: unit.layout.full_numel for unit in engine.runtime.units}
        spared = kept * block + (sizes["root"] if numel else 0)
        assert payload["all_gather"] == 2 * psi(engine) - spared


@on_ranks(2)
def test_accumulation_is_free_below_stage_2_and_reduces_every_micro_batch_above():
    for stage, (reductions, gathers) in {0: (1, 1), 1: (1, 1), 2: (3, 1), 3: (3, 6)}.items():
        config = stack_config(stage, accumulation=3, stage3_max_reuse_distance=0)
        with Engine(Stack(), config=config) as engine:
            payload, whole = moved(engine), psi(engine)
            assert payload["reduce_scatter"] == reductions * whole, stage
            assert payload["all_gather"] == gathers * whole, stage


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_nothing_is_reduced_inside_no_sync_below_stage_2(stage):
    with Engine(Stack(), config=stack_config(stage)) as engine:
        payload = engine._watch.recorder.payload_numel
        with engine.no_sync():
            micro_step(engine)
        assert engine._watch.recorder.payload_numel == payload
        micro_step(engine)
        engine.step()
        assert engine._watch.recorder.payload_numel["reduce_scatter"] == psi(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_frozen_parameters_are_never_reduced(stage):
    model = Stack()
    model.blocks[0].requires_grad_(False)
    model.inp.requires_grad_(False)
    with Engine(model, config=stack_config(stage)) as engine:
        payload = moved(engine)
        trained = sum(u.layout.full_numel for u in engine.runtime.units if u.trainable)
        assert payload["reduce_scatter"] == trained < psi(engine)
        if stage < 3:
            assert payload["all_gather"] == trained


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(3)
def test_a_rank_sends_its_part_of_the_volume(stage):
    """In a collective of N elements over W ranks, each rank sends the share (W - 1) / W, which it
    does not keep."""
    with Engine(Stack(), config=stack_config(stage, stage3_max_reuse_distance=0)) as engine:
        moved(engine)
        sent = engine._watch.recorder.sent_numel
        volume = sent["all_gather"] + sent["reduce_scatter"]
        assert volume == STAGES[stage].volume * psi(engine) * 2 // 3


class Worded(nn.Module):
    """An embedding, two blocks and a head; ``hooked``: the program computes with the table in a hook."""

    def __init__(self, *, hooked: bool = False, recomputed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.blocks = Stack(depth=2)
        self.recomputed = recomputed
        if hooked:
            self.embed.register_forward_hook(lambda module, _, out: out * module.weight.mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = torch.arange(x.shape[0])
        if self.recomputed:
            return checkpoint(lambda w: self.blocks(self.embed(w) + x), words, use_reentrant=False)
        return self.blocks(self.embed(words) + x)


@pytest.mark.parametrize(
    ("how", "gathers"), [({}, 1), ({"hooked": True}, 2), ({"recomputed": True}, 2)]
)
@on_ranks(2)
def test_an_embedding_is_not_gathered_for_backward(how, gathers):
    """It is gathered only if a hook of the program uses it or its forward runs again."""
    config = {**stack_config(3), "units": ["Block", "Embedding"]}
    with Engine(Worded(**how), config=config) as engine:
        moved(engine)
        entries = engine._watch.recorder.entries("all_gather")
        (embedding,) = (u for u in engine.runtime.units if u.name.startswith("embed"))
        assert entries[embedding.name].calls == gathers
        (linear,) = (u for u in engine.runtime.units if u.name.startswith("blocks.blocks.0"))
        assert entries[linear.name].calls == 2  # in each direction
