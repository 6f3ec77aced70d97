"""Buffers that exist only inside a step are bounded by the size of units, not by a configured size. The
report lists them.
"""

from __future__ import annotations

import pytest
from census import WIDTH, Stack, measured, micro_step, stack_config
from torch import nn
from zeroshard_testing import on_ranks

from zeroshard import Engine
from zeroshard.zero.gradients import GROUP_NUMEL
from zeroshard.zero.reduce import MAX_IN_FLIGHT

STAGES = (0, 1, 2, 3)
HUGE = 500_000_000
"""DeepSpeed's default bucket: a program that allocates it needs 1 GB for any model."""


def trained(model: nn.Module, config: dict) -> tuple[dict[str, int], Engine]:
    """The report after two steps, and the closed engine."""
    with Engine(model, config=config) as engine:
        for _ in range(2 * engine.accumulation.steps):
            micro_step(engine)
            engine.step()
        return measured(engine), engine


def full_nbytes(engine: Engine) -> dict[str, int]:
    """16-bit bytes of each unit."""
    return {unit.name: unit.layout.full_numel * 2 for unit in engine.runtime.units}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_huge_bucket_size_costs_no_more_than_the_model(stage):
    config = stack_config(stage, reduce_bucket_size=HUGE, allgather_bucket_size=HUGE)
    report, engine = trained(
        Stack(depth=1), config | {"units": ["Stack"]}
    )  # one unit: the worst case
    model_nbytes = sum(full_nbytes(engine).values())
    assert report["buckets"] <= model_nbytes
    assert report["gathered"] <= model_nbytes
    if stage >= 2:
        assert report["buckets"] > 0  # gradients do pass through them


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_reduce_buckets_hold_the_units_in_flight_and_one_more(stage):
    report, engine = trained(Stack(depth=12), stack_config(stage))
    units = full_nbytes(engine)
    largest = max(nbytes for name, nbytes in units.items() if name != "root")
    assert report["buckets"] <= units["root"] + (MAX_IN_FLIGHT + 2) * largest
    assert report["buckets"] < sum(units.values()) / 2


@on_ranks(2)
def test_gathered_parameters_are_the_root_and_three_units():
    report, engine = trained(Stack(depth=12), stack_config(3))
    units = full_nbytes(engine)
    largest = max(nbytes for name, nbytes in units.items() if name != "root")
    assert report["gathered"] <= units["root"] + 3 * largest


@on_ranks(2)
def test_without_prefetch_and_reuse_two_units_are_gathered():
    zero = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    report, engine = trained(Stack(depth=12), stack_config(3, **zero))
    units = full_nbytes(engine)
    largest = max(nbytes for name, nbytes in units.items() if name != "root")
    assert report["gathered"] <= units["root"] + 2 * largest


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_scratch_lists_messages_on_their_way_and_the_fp32_gradient_of_one_unit(stage):
    config = {**stack_config(stage), "transport": "p2p"}
    with Engine(Stack(depth=6), config=config) as engine:
        for _ in range(2):
            micro_step(engine)
            engine.step()
        transport_nbytes = engine._watch.gathers.scratch_nbytes
        ledger_nbytes = engine.runtime.ledger.peak("scratch")
        largest = max(unit.layout.full_numel for unit in engine.runtime.units)
        updated = largest if stage == 0 else largest // 2
        assert transport_nbytes > 0
        assert measured(engine)["scratch"] == ledger_nbytes
        assert measured(engine)["transport"] == transport_nbytes
        assert transport_nbytes <= (MAX_IN_FLIGHT + 1) * largest // 2 * 2
        waiting_nbytes = largest * 2  # gradients that are copied into their slots
        arriving_nbytes = (MAX_IN_FLIGHT + 1) * largest // 2 * 2 + waiting_nbytes
        assert updated * 4 <= ledger_nbytes <= max(updated * 4, arriving_nbytes)


@on_ranks(1)
def test_nothing_temporary_is_left_between_steps():
    for stage in STAGES:
        with Engine(Stack(), config=stack_config(stage)) as engine:
            for _ in range(2):
                micro_step(engine)
                engine.step()
            ledger = engine.runtime.ledger
            assert {c: ledger.nbytes(c) for c in ("gradients", "gathered", "buckets", "scratch")} == {
                "gradients": 0, "gathered": 0, "buckets": 0, "scratch": 0,
            }  # fmt: skip


@on_ranks(3)
def test_the_report_of_all_ranks_has_each_ranks_own_bytes():
    with Engine(Stack(), config=stack_config(3)) as engine:
        micro_step(engine)
        engine.step()
        report = engine.memory_report(all_ranks=True)
        assert sorted(report.ranks) == [0, 1, 2]
        # The exchange needs memory, which only the later report contains.
        theirs, mine = (
            [row for row in rows if row.category not in ("scratch", "transport", "peak")]
            for rows in (report.ranks[engine.global_rank], engine.memory_report().rows)
        )
        assert theirs == mine


@on_ranks(2)
def test_gradients_that_wait_for_their_copy_are_in_the_peak_of_scratch_memory():
    """Gradients of a unit are copied in groups; until then a group is beside the buffer."""
    config = stack_config(1, "fp32", accumulation=2) | {"units": ["Linear"]}
    with Engine(nn.Sequential(nn.Linear(WIDTH, WIDTH)), config=config) as engine:
        micro_step(engine)  # without an update or a reduction, which need scratch memory too
        (unit,) = engine.runtime.units
        numel = sum(slot.numel for slot in unit.layout.slots)
        assert numel <= GROUP_NUMEL
        assert engine.runtime.ledger.peak("scratch") == 4 * numel
