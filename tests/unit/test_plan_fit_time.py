"""``zeroshard plan --fit speed --machine``: few simulations find what simulating every one finds."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from zeroshard.config.machine_file import PRESETS, MachineFile, parse_machine
from zeroshard.planner.candidates import Candidate, Strategy, StrategyKind
from zeroshard.planner.fit import fit
from zeroshard.planner.fit_time import kinds_of, less_than
from zeroshard.planner.plan import make_plan

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


def simulated(candidate: Candidate, memory_gib: float) -> Any:
    return make_plan(
        NAME, candidate.config(CONFIG), memory_gib=memory_gib, machine=machine(), **ARGS
    )


def test_few_simulations_find_what_simulating_every_candidate_finds():
    memory_gib = 0.00011
    found = fit(NAME, CONFIG, aim="speed", memory_gib=memory_gib, machine=machine(), **ARGS)
    assert found.count == 7 * 6 == len({each.candidate for each in found.judged})
    assert found.simulations <= 14
    real = {each.candidate: simulated(each.candidate, memory_gib) for each in found.judged}
    fitting = {own: plan.time.total_s for own, plan in real.items() if plan.fits}
    assert found.chosen in fitting
    assert fitting[found.chosen] <= 1.005 * min(fitting.values())
    assert 0 < len(fitting) < len(real)
    losses = 64  # bytes: a number for each micro-batch, of which a search simulates two
    assert 0 <= real[found.chosen].peak_nbytes - found.plan.peak_nbytes <= losses
    for each in found.judged:
        plan = real[each.candidate]
        if each.peak_nbytes is not None and each.candidate.accumulation > 1:
            off = (
                0.05 if each.candidate.micro_batch > 1 else 0.2
            )  # one sample takes other operations
            assert each.peak_nbytes == pytest.approx(plan.peak_nbytes, rel=off), each
        elif each.peak_nbytes is not None:  # no gradients are kept for the next micro-batch
            assert each.peak_nbytes >= plan.peak_nbytes, each
        if each.seconds is not None:
            assert each.seconds == pytest.approx(plan.time.total_s, rel=0.05), each
    if found.larger is not None:
        assert found.larger.simulated
        assert abs(found.larger.peak_nbytes - real[found.larger.candidate].peak_nbytes) <= losses


def test_two_micro_batches_give_the_time_of_many():
    config = CONFIG | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 6}
    many, few = (
        make_plan(NAME, config, machine=machine(), few=few, **ARGS) for few in (False, True)
    )
    assert few.time.samples == many.time.samples == 48
    assert few.time.total_s == pytest.approx(many.time.total_s, rel=0.02)
    assert 0 <= many.peak_nbytes - few.peak_nbytes <= 64  # losses, one number for each micro-batch
    assert any(line.startswith("2 of 6 micro-batches") for line in few.assumed)


def test_what_the_machine_file_lacks_leaves_out_the_kinds_that_need_it():
    slow = {"[copies]\nhost_to_device_bytes_per_s": "[copies]\n#"}
    found = fit(NAME, CONFIG, aim="speed", memory_gib=1.0, machine=machine(**slow), **ARGS)
    away = [each for each in found.judged if each.candidate.strategy.optimizer]
    assert away
    assert found.chosen is not None
    assert all(each.seconds is None for each in away)


def test_a_kind_comes_after_those_that_it_adds_to():
    kinds = kinds_of(2)
    for at, kind in enumerate(kinds):
        assert all(parent in kinds[:at] for parent in less_than(kind))
    both = StrategyKind(Strategy(3, optimizer=True, params=True), True)
    assert len(less_than(both)) == 2
