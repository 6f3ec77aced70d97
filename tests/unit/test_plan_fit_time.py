"""``zeroshard plan --fit speed --machine``: few simulations find what simulating every one finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.covering import sampled
from torch import nn

from zeroshard.config.machine_file import PRESETS, MachineFile, parse_machine
from zeroshard.planner import fit_time
from zeroshard.planner.candidates import (
    Candidate,
    Sizes,
    Strategy,
    StrategyKind,
    candidates_of,
    refusal,
)
from zeroshard.planner.fit import calm_collector, fit
from zeroshard.planner.fit_time import kinds_of, less_than, search_by_time, with_less_offload
from zeroshard.planner.growth import Growth, without_engine
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.planner.step_log import Begun, Ended, Operation, Work

WIDTH, LENGTH, SAMPLES = 32, 16, 12
CONFIG = {
    "train_micro_batch_size_per_gpu": SAMPLES, "bf16": {"enabled": True}, "unit_min_numel": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}  # fmt: skip


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.blocks(self.table(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def words() -> nn.Module:
    return Words()


def machine(**numbers: str) -> MachineFile:
    """An H100 whose host is fast, so that work is what takes time."""
    text = (PRESETS / "h100.toml").read_text()
    for old, new in {
        "operation_s = {value = 1e-5": "operation_s = {value = 1e-9",
        **numbers,
    }.items():
        assert text.count(old)
        text = text.replace(old, new)
    return parse_machine(text, "a test")


NAME = f"{__name__}:words"
ARGS: dict[str, Any] = {"ranks": 4, "length": LENGTH}


def small_llama(folder: Path, *, layers: int, width: int) -> str:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=2 * width, vocab_size=128, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.full
@pytest.mark.timeout(600)  # 49 simulations
def test_few_simulations_find_what_simulating_every_candidate_finds(tmp_path):
    """With one and two tensor ranks. Each limit of memory is a search of its own; plans are made once."""
    llama = small_llama(tmp_path, layers=1, width=128)
    samples = {Sizes(tensor=1): 2, Sizes(tensor=2): 4}
    made: dict[Candidate, Any] = {}

    def real(own: Candidate) -> Any:
        if own not in made:
            config = own.config(CONFIG | {"unit_min_numel": 1000})
            made[own] = make_plan(
                Asked(llama, config, machine=machine(), memory_gib=1.0, **ARGS),
                few=True,
                checkpointing=own.checkpointing,
            )
        return made[own]

    kinds = [kind for sizes in samples for kind in kinds_of(sizes, can_checkpoint=False)]
    every = [own for kind in kinds for own in candidates_of(kind, samples[kind.sizes])]
    assert len(every) == 7 * (2 + 3)
    with calm_collector():
        peaks = sorted(real(own).peak_nbytes for own in every)
        limits = (peaks[0] - 1, *(peaks[n] for n in (2, 19, 29)))
        found = [
            search_by_time(
                lambda own, limit=limit: replace(real(own), limit_nbytes=limit),
                CONFIG, machine(), samples=samples, can_checkpoint=False,
            )
            for limit in limits
        ]  # fmt: skip
    assert found[0].chosen is None
    assert found[0].plan.peak_nbytes == peaks[0]
    for limit, fit_found in zip(limits[1:], found[1:], strict=True):
        fitting = [own for own in every if real(own).peak_nbytes <= limit]
        best_s = min(real(own).time.total_s for own in fitting)
        assert fit_found.chosen in fitting
        assert real(fit_found.chosen).time.total_s == pytest.approx(best_s, rel=1e-6)
        assert fit_found.simulations < len(every)
        assert {each.candidate for each in fit_found.judged} == set(every)
        for each in fit_found.judged:
            own, plan = each.candidate, real(each.candidate)
            if each.simulated:
                assert (each.peak_nbytes, each.seconds) == (plan.peak_nbytes, plan.time.total_s)
            if each.peak_nbytes is not None and own.accumulation == 1:  # at least
                assert each.peak_nbytes <= 1.05 * plan.peak_nbytes, each
            elif each.peak_nbytes is not None:  # one sample takes other operations
                off = 0.2 if own.micro_batch == 1 else 0.05
                assert each.peak_nbytes == pytest.approx(plan.peak_nbytes, rel=off), each
            elif each.why.startswith("does not fit"):
                assert plan.peak_nbytes > limit, each
            if each.seconds is not None:
                assert each.seconds == pytest.approx(plan.time.total_s, rel=0.05), each
        if fit_found.larger is not None:
            assert fit_found.larger.simulated
    winners = [each.chosen.kind for each in found[1:]]
    assert {kind.sizes.tensor for kind in winners} == {1, 2}
    assert len({kind.strategy for kind in winners}) == 3


LOSSES_NBYTES = 64
"""One number for each micro-batch that was not simulated."""


@pytest.mark.full
def test_pipelines_are_searched_like_simulating_every_candidate(tmp_path, monkeypatch):
    """With one and two stages; every candidate is simulated with all micro-batches of its step."""
    llama = small_llama(tmp_path, layers=2, width=64)
    monkeypatch.setattr(fit_time, "STRATEGIES", [(Strategy(0),), (Strategy(2),)])
    samples = {Sizes(pipeline=1): 2, Sizes(pipeline=2): 4}
    made: dict[Candidate, Any] = {}

    def real(own: Candidate) -> Any:
        if own not in made:
            config = own.config(CONFIG | {"unit_min_numel": 1000})
            made[own] = make_plan(
                Asked(llama, config, machine=machine(), memory_gib=1.0, ranks=2, length=LENGTH)
            )
        return made[own]

    kinds = [kind for sizes in samples for kind in kinds_of(sizes, can_checkpoint=False)]
    every = [own for kind in kinds for own in candidates_of(kind, samples[kind.sizes])]
    able = [own for own in every if not refusal(own)]
    assert (len(every), len(able)) == (2 * (2 + 3), 2 * (2 + 2))
    with calm_collector():
        peaks = sorted(real(own).peak_nbytes for own in able)
        winners = set()
        for limit in (peaks[0] + LOSSES_NBYTES, peaks[3] + LOSSES_NBYTES):
            found = search_by_time(
                lambda own, limit=limit: replace(real(own), limit_nbytes=limit),
                CONFIG, machine(), samples=samples, can_checkpoint=False,
            )  # fmt: skip
            fitting = [own for own in able if real(own).peak_nbytes <= limit]
            best_s = min(real(own).time.total_s for own in fitting)
            assert found.chosen in fitting
            assert real(found.chosen).time.total_s == pytest.approx(best_s, rel=1e-6)
            assert found.plan.peak_nbytes == real(found.chosen).peak_nbytes
            winners.add(found.chosen.micro_batch)
            assert {each.candidate for each in found.judged} == set(every)
            for each in found.judged:
                own = each.candidate
                if refusal(own):
                    assert each.why.startswith("cannot run: the schedule 1F1B needs at least as")
                elif each.seconds is not None:
                    assert each.seconds == pytest.approx(real(own).time.total_s, rel=0.05), each
                if each.peak_nbytes is not None and not refusal(own):
                    assert each.peak_nbytes <= 1.2 * real(own).peak_nbytes, each
    assert winners == {1, 2}
    own = Candidate(Strategy(2), False, 1, 4, Sizes(pipeline=2))
    line = make_plan(
        Asked(
            llama,
            own.config(CONFIG | {"unit_min_numel": 1000}),
            machine=machine(),
            ranks=2,
            length=LENGTH,
        ),
        few=True,
    )
    assert any(each.startswith("3 of 4 micro-batches") for each in line.assumed)
    assert line.time.total_s == pytest.approx(real(own).time.total_s, rel=0.02)
    for few, whole in zip(line.stages, real(own).stages, strict=True):
        assert 0 <= whole.peak_nbytes - few.peak_nbytes <= LOSSES_NBYTES


@pytest.mark.parametrize("allowed", sampled([fit_time.MOST_NEAR, 0], every=2))
def test_what_lines_put_just_above_the_limit_is_simulated(monkeypatch, allowed):
    """Stage 2 has the smallest peak by its line, and does not fit. Stage 3 fits, by 0.3 %."""
    monkeypatch.setattr(fit_time, "STRATEGIES", [(Strategy(2),), (Strategy(3),)])
    monkeypatch.setattr(fit_time, "MOST_NEAR", allowed)
    unit = 10**7  # bytes
    made: list[Candidate] = []

    def simulated(own: Candidate) -> Any:
        made.append(own)
        stage, size = own.strategy.stage, own.micro_batch
        peak = {2: 980, 3: 985}[stage] + 20 * size - (10 if (stage, size) == (3, 1) else 0)
        plan = make_plan(Asked(NAME, own.config(CONFIG), machine=machine(), **ARGS), few=True)
        moments = {
            name: replace(moment, device_nbytes=peak * unit)
            for name, moment in plan.simulation.moments.items()
        }
        of_stages = (replace(plan.simulation, moments=moments),)
        return replace(plan, limit_nbytes=998 * unit, simulation=of_stages[0], of_stages=of_stages)

    found = search_by_time(simulated, CONFIG, machine(), samples={Sizes(): 6}, can_checkpoint=False)
    assert found.simulations == len(made)
    if not allowed:
        assert found.chosen is None and found.plan.peak_nbytes == 1000 * unit
        return
    assert found.chosen == Candidate(Strategy(3), False, 1, 6)
    assert found.plan.peak_nbytes == 995 * unit
    assert len(made) <= 3 + 2 + allowed


def test_two_micro_batches_give_the_time_of_many():
    config = CONFIG | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}
    many, few = (
        make_plan(Asked(NAME, config, machine=machine(), **ARGS), few=few) for few in (False, True)
    )
    assert few.time.samples == many.time.samples == 48
    assert few.time.total_s == pytest.approx(many.time.total_s, rel=0.02)
    assert 0 <= many.peak_nbytes - few.peak_nbytes <= 64  # losses, one number for each micro-batch
    assert any(line.startswith("2 of 6 micro-batches") for line in few.assumed)


def test_what_the_machine_file_lacks_leaves_out_the_kinds_that_need_it():
    slow = {"[copies]\nhost_to_device_bytes_per_s": "[copies]\n#"}
    found = fit(Asked(NAME, CONFIG, memory_gib=1.0, machine=machine(**slow), **ARGS), aim="speed")
    away = [each for each in found.judged if each.candidate.strategy.optimizer]
    assert away
    assert found.chosen is not None
    assert all(each.seconds is None for each in away)


def test_a_kind_comes_after_those_that_it_adds_to():
    kinds = kinds_of(Sizes(tensor=2))
    for at, kind in enumerate(kinds):
        assert all(parent in kinds[:at] for parent in less_than(kind))
    both = StrategyKind(Strategy(3, optimizer=True, params=True), True)
    assert len(less_than(both)) == 2
    assert with_less_offload(both) == [
        StrategyKind(Strategy(3, optimizer=True), True), StrategyKind(Strategy(3), True),
    ]  # fmt: skip


def test_collectives_of_layers_grow_with_the_micro_batch_and_stay_without_the_engine():
    work = Work("mm", "matmul", 8, "bfloat16", 8, 4, 4)

    def step(nbytes: int) -> Any:
        key, events = "all_reduce of layers", []
        for _ in range(2):
            events += [Begun("unit", "all_gather", 64, (0, 1)), Operation("forward", work)]
            events += [Begun(key, "all_reduce", nbytes, (0, 1)), Ended(key), Ended("unit")]
        return Steps((*events, Operation("step", work)), (0, 5), {})

    low, high = step(200), step(300)
    grown = Growth.between(low, high).at(6)
    assert [grown.nbytes(low.events[at]) for at in (0, 2)] == [64, 600]
    left = without_engine(low, with_update=False)
    assert [type(event) for event in left.events] == [Operation, Begun, Ended] * 2
    assert left.starts == (0, 3)


@dataclass(frozen=True)
class Steps:
    """The part of a simulation that the step is in."""

    events: tuple[Any, ...]
    starts: tuple[int, ...]
    moments: dict[str, Any]
