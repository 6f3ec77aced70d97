"""Arithmetic that rules configurations out: it must not claim more than a simulation shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from torch import nn

from zeroshard.parallel import MoE
from zeroshard.planner.candidates import Candidate, Strategy, StrategyKind
from zeroshard.planner.fit_time import _Search
from zeroshard.planner.growth import least_states_nbytes, offloadable_nbytes
from zeroshard.planner.make_plan import Asked, make_plan
from zeroshard.planner.plan import Plan
from zeroshard.planner.simulated import Simulation

RANKS = 8
STATES = ("parameters", "master", "optimizer")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.middle = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.middle(self.table(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def planned(stage: int, net: str = "Net", **zero: Any) -> Plan:
    config = {
        "train_micro_batch_size_per_gpu": 1, "unit_min_numel": 1,
        "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": stage, **zero},
    }  # fmt: skip
    return make_plan(Asked(f"{__name__}:{net}", config, ranks=RANKS, length=4))


def held(found: Simulation) -> int:
    return sum(r.measured for r in found.memory if r.category in STATES and r.tier == "device")


def test_padding_of_many_shards_is_not_taken_for_state():
    """Shards are padded, here by 9 %, so all of them have more than a rank with whole states."""
    shards, real = planned(3).simulation, held(planned(0).simulation)
    assert held(shards) * RANKS > real
    assert 0.8 * real < least_states_nbytes([shards], 3, Strategy(0), 1, 1, 1) <= real


class Experts(nn.Module):
    """Nearly all parameters are those of experts, which four ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.moe = MoE(64, lambda: nn.Linear(64, 64), 16, 4, k=1, drop_tokens=False)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        logits = self.head(self.moe(self.table(input_ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_a_rank_that_shards_nothing_has_a_part_of_the_experts_only():
    shards, whole = planned(3, "Experts").simulation, planned(0, "Experts").simulation
    assert shards.mesh.expert == whole.mesh.expert == 4
    assert held(shards) * RANKS > 2 * held(whole)  # as if every rank had all experts
    assert 0 < least_states_nbytes([shards], 3, Strategy(0), 1, 1, 4) <= held(whole)
    assert 0 < least_states_nbytes([whole], 0, Strategy(3), 1, 1, 4) <= held(shards)
    assert 0 < least_states_nbytes([whole], 0, Strategy(0), 1, 1, 8) <= held(whole) // 2


def test_offload_takes_no_more_from_the_device_than_is_said():
    plain = planned(2).simulation
    away = planned(2, offload_optimizer={"device": "cpu"}).simulation
    said = offloadable_nbytes(plain, Strategy(2, optimizer=True))
    assert 0 < plain.peak_nbytes - away.peak_nbytes <= said


def test_with_offload_larger_micro_batches_may_fit():
    """A sample has 100 bytes of 250, and offload takes 200 from the device: four fit then."""
    kind = StrategyKind(Strategy(2), False)
    row = SimpleNamespace(category="optimizer", tier="device", measured=200)
    known = SimpleNamespace(
        plan=SimpleNamespace(of_stages=[SimpleNamespace(memory=[row])], limit_nbytes=250),
        peak_nbytes=lambda size: 100 * size,
        seconds={1: 4.0, 2: 3.0, 4: 2.0, 8: 1.0},
    )
    search = SimpleNamespace(
        candidates=lambda kind: [Candidate(kind.strategy, False, n, 8 // n) for n in (1, 2, 4, 8)]
    )
    more = kind._replace(strategy=Strategy(2, optimizer=True))
    assert _Search._fastest_s(cast(Any, search), more, kind, cast(Any, known)) == 2.0
