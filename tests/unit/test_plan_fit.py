"""``zeroshard plan --fit``: the search over candidates, on peaks that are given by a formula."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from zeroshard.config.machine_file import PRESETS, parse_machine
from zeroshard.planner.axes import (
    axis_sizes,
    read_axes,
    samples_by_sizes,
    sizes_of,
)
from zeroshard.planner.candidates import (
    AS_CONFIGURED,
    STRATEGIES,
    Candidate,
    Sizes,
    Strategy,
    candidates_of,
    kinds_by_experience,
    refusal,
)
from zeroshard.planner.fit import search

STATES = {0: 1200, 1: 900, 2: 700, 3: 300}


def peak(candidate: Candidate, *, bend: int = 0) -> int:
    """Bytes. ``bend``: how much faster than linear the peak grows with the micro-batch."""
    strategy, size = candidate.strategy, candidate.micro_batch
    states = STATES[strategy.stage] - 150 * strategy.optimizer - 50 * strategy.params
    sums = 40 if candidate.accumulation > 1 else 0
    return (
        states + sums + (20 if candidate.checkpointing else 100) * size + bend * size * (size - 1)
    )


def found(limit: int, *, aim: Any = "speed", samples: int = 12, bend: int = 0, **keys: Any) -> Any:
    made: list[Candidate] = []

    def simulated(candidate: Candidate) -> Any:
        made.append(candidate)
        nbytes = peak(candidate, bend=bend)
        return SimpleNamespace(peak_nbytes=nbytes, fits=nbytes <= limit)

    keys = {"can_checkpoint": True, **keys}
    result = search(simulated, {}, aim=aim, samples={AS_CONFIGURED: samples}, **keys)
    assert len(set(made)) == len(made) == result.simulations
    return result


def fastest(limit: int, samples: int, *, bend: int = 0) -> Candidate | None:
    """The first candidate that fits, by looking at every one in order."""
    sizes = [n for n in range(samples, 0, -1) if samples % n == 0]
    for group in STRATEGIES:
        for checkpointing in (False, True):
            for strategy in group:
                for size in sizes:
                    candidate = Candidate(strategy, checkpointing, size, samples // size)
                    if peak(candidate, bend=bend) <= limit:
                        return candidate
    return None


@pytest.mark.parametrize(
    ("samples", "bend"), [(1, 0), (12, 0), (360, 0), (12, 3), (360, 3), (12, -1)]
)
def test_the_result_is_that_of_looking_at_every_candidate(samples, bend):
    for limit in range(100, 3000, 37):
        result = found(limit, samples=samples, bend=bend)
        expected = fastest(limit, samples, bend=bend)
        assert result.chosen == expected, limit
        assert result.count == 14 * len([n for n in range(1, samples + 1) if samples % n == 0])
        if expected is not None and result.larger is not None:
            larger = result.larger.candidate
            assert larger.micro_batch > expected.micro_batch
            assert result.larger.peak_nbytes == peak(larger, bend=bend) > limit


def cut_peak(own: Candidate) -> int:
    """Bytes on tensor ranks, which have a part of the states and of half of the activations."""
    states = peak(replace(own, micro_batch=0))
    return states // own.sizes.tensor + (peak(own) - states) * (own.sizes.tensor + 1) // (
        2 * own.sizes.tensor
    )


def test_tensor_sizes_are_tried_before_parameters_are_gathered_or_offloaded():
    samples = {Sizes(tensor=size): 6 * size for size in (1, 2, 4)}
    levels = [STRATEGIES[0] + STRATEGIES[1], *STRATEGIES[2:]]
    places = {strategy: at for at, level in enumerate(levels) for strategy in level}
    every = [
        own
        for kind in kinds_by_experience(list(samples), can_checkpoint=True)
        for own in candidates_of(kind, samples[kind.sizes])
    ]
    assert len(every) == len(set(every)) == 14 * (4 + 6 + 8)
    seen = set()
    for limit in range(100, 1500, 53):
        result = search(
            lambda own, limit=limit: SimpleNamespace(
                peak_nbytes=cut_peak(own), fits=cut_peak(own) <= limit
            ),
            {}, aim="speed", samples=samples, can_checkpoint=True,
        )  # fmt: skip
        fitting = [own for own in every if cut_peak(own) <= limit]
        expected = min(
            fitting,
            key=lambda own: (
                places[own.strategy], own.sizes.tensor, min(own.strategy.stage, 1),
                own.checkpointing, own.strategy.stage, -own.micro_batch,
            ),
            default=None,
        )  # fmt: skip
        assert result.chosen == expected, limit
        seen.add(result.chosen and (result.chosen.strategy.stage, result.chosen.sizes.tensor))
        assert {each.candidate for each in result.judged} == set(every)
    assert {(0, 1), (1, 1), (1, 4)} <= seen


def test_a_candidate_names_the_tensor_ranks_in_its_configuration():
    base = {"parallel": {"tensor": 2}, "tensor_parallel": {"tp": {"tp_size": 2}, "dtype": "bf16"}}
    made = [Candidate(Strategy(1), False, 2, 4, Sizes(size)).config(base) for size in (1, 4, None)]
    assert [own.get("parallel") for own in made] == [None, None, {"tensor": 2}]
    assert [own["tensor_parallel"] for own in made] == [
        {"dtype": "bf16"}, {"dtype": "bf16", "autotp_size": 4}, base["tensor_parallel"],
    ]  # fmt: skip
    assert "stage 1, tensor 4, without" in Candidate(Strategy(1), False, 2, 4, Sizes(4)).text


def test_sizes_of_an_axis():
    h100 = parse_machine((PRESETS / "h100.toml").read_text(), "h100")
    assert read_axes("tensor = 4, 1") == {"tensor": (1, 4)}
    assert axis_sizes("tensor", (), ranks=64, machine=h100) == (1, 2, 4, 8)
    assert axis_sizes("tensor", (), ranks=12, machine=None) == (1, 2, 4)
    assert axis_sizes("tensor", (3, 12), ranks=12, machine=None) == (3, 12)
    every = sizes_of({"tensor": (1, 2, 4)}, ranks=16, machine=None)
    assert samples_by_sizes(24, every, ranks=16)[0] == {Sizes(2): 3, Sizes(4): 6}
    assert read_axes("pipeline,tensor=2") == {"pipeline": (), "tensor": (2,)}
    assert axis_sizes("pipeline", (), ranks=48, machine=None) == (1, 2, 3, 4, 6, 8)
    both = sizes_of({"pipeline": (1, 4), "tensor": (1, 2)}, ranks=8, machine=None)
    assert both == [Sizes(1, 1), Sizes(2, 1), Sizes(1, 4), Sizes(2, 4)]
    samples, refused = samples_by_sizes(12, both, ranks=8)
    assert samples == {Sizes(2, 1): 3, Sizes(1, 4): 6, Sizes(2, 4): 12}
    assert "12 samples of a step do not divide over 8" in refused[both[0]]
    few = samples_by_sizes(4, [Sizes(None, 4)], ranks=8)[1]
    assert "has 2 samples in a step, fewer than the 4 micro-batches" in few[Sizes(None, 4)]


def test_a_candidate_names_the_ranks_that_share_experts():
    base = {"expert_parallel": {"autoep_size": 4, "enabled": True}, "parallel": {"expert": 4}}
    made = [Candidate(Strategy(3), False, 2, 4, Sizes(expert=n)).config(base) for n in (1, 8, None)]
    assert [own.get("parallel") for own in made] == [None, {"expert": 8}, {"expert": 4}]
    assert [own["expert_parallel"] for own in made] == [
        {"enabled": True}, {"enabled": True}, base["expert_parallel"],
    ]  # fmt: skip
    every = sizes_of({"expert": (), "tensor": (1, 2)}, ranks=16, machine=None, ranks_per_node=4)
    assert every[:4] == [Sizes(1, None, 1), Sizes(1, None, 2), Sizes(1, None, 4), Sizes(2, None, 1)]
    assert (
        samples_by_sizes(32, every, ranks=16)[0][Sizes(2, None, 4)] == 4
    )  # experts divide no samples


def test_a_candidate_names_its_pipeline_stages_in_its_configuration():
    base = {"parallel": {"pipeline": 8, "data_replicate": 2}, "bf16": {"enabled": True}}
    made = [Candidate(Strategy(1), False, 2, 4, Sizes(None, n)).config(base) for n in (1, 4, None)]
    assert [own.get("parallel") for own in made] == [
        {"data_replicate": 2}, {"data_replicate": 2, "pipeline": 4}, base["parallel"],
    ]  # fmt: skip
    assert [refusal(Candidate(Strategy(1), False, 1, n, Sizes(None, 4))) == "" for n in (3, 4)] == [
        False, True,
    ]  # fmt: skip


def test_hundreds_of_candidates_cost_few_simulations():
    result = found(1500, samples=360)
    assert result.count == 336
    assert result.simulations <= 11


def test_a_peak_that_does_not_depend_on_small_batches_costs_few_simulations():
    made: list[Candidate] = []

    def simulated(candidate: Candidate) -> Any:
        made.append(candidate)
        nbytes = max(900, 30 * candidate.micro_batch)
        return SimpleNamespace(peak_nbytes=nbytes, fits=nbytes <= 1000)

    result = search(simulated, {}, aim="speed", samples={AS_CONFIGURED: 360}, can_checkpoint=False)
    assert result.chosen == Candidate(Strategy(0), False, 30, 12)
    assert len(made) <= 8


def test_the_smallest_peak():
    result = found(5000, aim="memory")
    assert result.chosen == Candidate(Strategy(3, optimizer=True, params=True), True, 1, 12)
    assert found(100, aim="memory").chosen is None


def test_a_model_without_checkpointing():
    result = found(5000, can_checkpoint=False)
    assert {each.candidate.checkpointing for each in result.judged} == {False}
    assert result.count == 42


def test_what_fits_nowhere_is_the_smallest_of_all():
    result = found(10)
    assert result.chosen is None
    assert result.plan.peak_nbytes == min(
        each.peak_nbytes for each in result.judged if each.simulated
    )
    assert {each.why for each in result.judged} == {"does not fit", "does not fit with one sample"}


def test_a_candidate_changes_the_keys_of_its_axes_only():
    base = {
        "train_batch_size": 64,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 100,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
            "offload_param": {"device": "none", "pin_memory": True},
        },
    }  # fmt: skip
    made = Candidate(Strategy(3, optimizer=True, params=True), False, 2, 4).config(base)
    assert made == {
        "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 100,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast"},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }  # fmt: skip
    plain = Candidate(Strategy(1), False, 2, 4).config(base)
    assert plain["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 100}
    assert base["train_batch_size"] == 64
