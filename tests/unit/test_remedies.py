"""Changes that free memory: bytes by hand, their order, and what is not offered."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from zeroshard.core.layout import pack
from zeroshard.core.stages import StateBytes, UnitBytes
from zeroshard.engine.remedies import TOO_MUCH, Run, changes, enough_nbytes, remedies

RECOMPUTE = "model.gradient_checkpointing_enable()"
RANKS, UNITS, NUMEL = 4, 8, 128 * 64
BIG = 10**7


def unit(grad_nbytes: int = 2) -> UnitBytes:
    """16-bit parameters and gradients, fp32 masters, Adam."""
    layout = pack([("w", (128, 64))], num_shards=RANKS)
    return UnitBytes(layout, 2, grad_nbytes, master_nbytes=4, state={"w": StateBytes(8)})


def run(**changed: Any) -> Run:
    plain = Run(
        units=[unit()] * UNITS,
        accumulated=[unit()] * UNITS,  # already, with accumulation
        rank=0,
        stage=0,
        micro_batch=6,
        accumulation=5,
        activation_nbytes=0,
        has_host=True,
        checkpointing="",
        offloads_optimizer=False,
        offloads_params=False,
        block_nbytes=0,
    )
    return replace(plain, **changed)


def lines(found: Run, asked: int = 1, count: int = 10) -> dict[str, int]:
    return {each.line: each.freed_nbytes for each in remedies(found, asked, count)}


def zero(**keys: Any) -> str:
    return json.dumps({"zero_optimization": keys})


def test_a_stage_frees_its_states_less_what_it_holds_for_a_moment():
    found = lines(run())
    states = UNITS * NUMEL
    cast = 4 * NUMEL  # of the gradients of a unit in the update, where stage 0 holds the most
    live = 3 * NUMEL
    reduced = 2 * 2 * live  # gradients, and what arrives of them
    assert found[zero(stage=2)] == states * (16 - 2 - 14 / RANKS) + cast - reduced
    assert found[zero(stage=3)] == states * (16 - 16 / RANKS) + cast - reduced - live * 2


def test_states_go_to_the_host_where_there_is_one():
    to_host = {"device": "cpu"}
    found = lines(run(stage=2))
    optimizer = zero(stage=2, offload_optimizer=to_host)
    everything = zero(stage=3, offload_optimizer=to_host, offload_param=to_host)
    assert found[optimizer] == UNITS * NUMEL * 12 / RANKS
    assert found[everything] == UNITS * NUMEL * (12 / RANKS + 2) - 3 * NUMEL * 2
    assert {*lines(run(stage=2, has_host=False))} == {zero(stage=3)}
    is_away = run(stage=2, offloads_optimizer=True, offloads_params=True)
    assert {*lines(is_away)} == {zero(stage=3)}
    already = zero(stage=3, offload_param=to_host)  # what is offloaded stays where it is
    assert already in lines(run(stage=2, offloads_optimizer=True))


def test_at_stage_3_parameters_in_host_memory_leave_as_they_are():
    """Whole units are live before and after."""
    to_host = {"device": "cpu"}
    everything = zero(stage=3, offload_optimizer=to_host, offload_param=to_host)
    assert lines(run(stage=3))[everything] == UNITS * NUMEL * 14 / RANKS


def test_gradients_that_are_not_there_at_the_peak_free_nothing():
    """Without accumulation a forward has none, so of a large forward stage 2 saves the optimizer only."""
    large = run(accumulation=1, activation_nbytes=10**8)
    saved = UNITS * NUMEL * 12 * (1 - 1 / RANKS)
    once, summed = (next(changes(each)) for each in (large, replace(large, accumulation=2)))
    assert once.line == summed.line == zero(stage=2)
    assert once.freed_nbytes == saved
    assert summed.freed_nbytes == saved + UNITS * NUMEL * 2 * 0.75


def test_activations_free_no_more_than_down_to_what_the_end_of_backward_holds():
    checkpoint = "model.gradient_checkpointing_enable()"
    n = UNITS * NUMEL
    tight = run(stage=1, checkpointing=RECOMPUTE, accumulation=1, activation_nbytes=8 * n)
    eight, three = replace(tight, block_nbytes=n), replace(tight, block_nbytes=8 * n // 3)
    assert lines(eight)[checkpoint] == 4 * n
    assert abs(lines(replace(three, stage=3))[checkpoint] - 8 * n * (1 - 0.3 - 1 / 3)) < 2
    assert checkpoint not in lines(replace(tight, block_nbytes=8 * n))  # no blocks are known
    # At the end: all gradients, those of three units that arrive, and a block.
    floor = replace(eight, activation_nbytes=4 * n, block_nbytes=0)
    assert lines(floor)[checkpoint] == 4 * n - n * 2 - 3 * NUMEL * 2
    assert lines(replace(floor, block_nbytes=n // 2))[checkpoint] == 4 * n - n * 5 // 2 - 6 * NUMEL


def test_a_smaller_micro_batch_keeps_the_batch_of_a_step_and_pays_for_the_sums():
    found = lines(run(stage=3, has_host=False, activation_nbytes=BIG))
    line = json.dumps({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 10})
    assert found == {line: BIG // 2}
    thirds = run(
        stage=3, has_host=False, micro_batch=9, accumulation=1, activation_nbytes=9 * BIG,
        accumulated=[unit(4)] * UNITS,
    )  # fmt: skip
    line = json.dumps({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 3})
    sums = UNITS * NUMEL * 4 // RANKS
    assert lines(thirds) == {line: 6 * BIG - sums}
    assert not lines(run(stage=3, has_host=False, micro_batch=1, activation_nbytes=BIG))


def test_the_micro_batch_is_the_largest_that_frees_enough():
    tight = run(stage=3, has_host=False, micro_batch=12, activation_nbytes=12 * 10**6)
    offered = {
        missing: json.loads(next(iter(lines(tight, missing * 10**6))))[
            "train_micro_batch_size_per_gpu"
        ]
        for missing in (1, 5, 6, 7, 8, 9, 10, 11, 99)
    }
    # Of a peak of about 12 MB, 2 % more have to be free by the arithmetic, so 6 MB are not for 6.
    # 11 MB are what the smallest one frees, and no other one frees as much.
    assert offered == {1: 6, 5: 6, 6: 4, 7: 4, 8: 3, 9: 2, 10: 1, 11: 1, 99: 1}


def test_what_may_not_be_enough_is_offered_only_if_nothing_is():
    tight = run(checkpointing=RECOMPUTE, activation_nbytes=10**6, micro_batch=1)
    frees = sorted(each.freed_nbytes for each in changes(tight) if each.freed_nbytes > 0)
    spare = enough_nbytes(tight, 0)
    states = UNITS * NUMEL * 16
    assert spare == int(TOO_MUCH * (states + 10**6))  # the peak is in a forward, of several
    assert min(lines(tight, frees[0] - spare).values()) == frees[0]
    assert min(lines(tight, frees[0] - spare + 1).values()) == frees[1]
    assert {*lines(tight, frees[-1]).values()} == {frees[-1]}
    assert {*lines(tight, frees[-1] + 1).values()} >= {*frees}


def test_the_order_is_slowdown_per_byte_and_small_changes_are_left_out():
    tight = run(checkpointing=RECOMPUTE, activation_nbytes=10**6)
    first = [each.text for each in remedies(tight, 1)]
    assert len(first) == 3
    assert first[0] == "stage 2 instead of stage 0"
    frees = lines(tight)
    least = min(frees.values())
    assert min(lines(tight, least + 1).values()) > least
    assert len(lines(tight, 10**12)) == len(frees)  # none alone is enough, so all are told
