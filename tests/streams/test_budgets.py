"""What one steady step may cost: host waits, device memory, copies from pageable memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from scenarios import Run, Scenario, cuda, in_child, prepare
from zeroshard_testing import on_ranks

from zeroshard.core.ledger import RESTING, TEMPORARY
from zeroshard.core.tiers import Tier
from zeroshard.memory import storage

STEPS = 4
SMALL_NBYTES = 256
"""Numbers of a step that the ledger does not count: factors, flags, the loss."""


@dataclass(frozen=True)
class Costs:
    """Of the last of :data:`STEPS` steps. Memory is in bytes on the device, the ledger's and the real."""

    waits: dict[str, dict[str, int]]  # by phase, of the main thread
    memory: dict[str, tuple[int, int]]
    pageable: int
    allocations: list[tuple[int, int]]  # of every step


def costs(scenario: Scenario) -> Costs:
    """Measure a training of :data:`STEPS` steps."""
    storage._weights.clear()  # else those of an earlier test are used, and none are new
    with cuda(scenario.ranks) as watch:
        run = Run(scenario, "cuda", watch)
        trained = run.open()
        ledger = trained.runtime.ledger
        waits, memory, allocations = {}, {}, []

        def look(phase: str) -> None:
            waits[phase] = dict(watch.waits(f"{phase} {at}", thread="main"))
            planned = sum(ledger.nbytes(name, Tier.DEVICE) for name in (*RESTING, *TEMPORARY))
            memory[phase] = planned, watch.live_nbytes

        for at in range(STEPS):
            x_BD = run.batch()
            with watch.phase(f"forward {at}"):
                loss = trained(x_BD).float().square().mean()
            with watch.phase(f"backward {at}"):
                trained.backward(loss)
            del loss, x_BD
            look("backward")
            with watch.phase(f"step {at}"):
                trained.step()
            look("step")
            waits["forward"] = dict(watch.waits(f"forward {at}", thread="main"))
            phases = [watch.counts(f"{phase} {at}") for phase in ("forward", "backward", "step")]
            allocations.append(
                (sum(c.allocations for c in phases), sum(c.allocated_nbytes for c in phases))
            )
        pageable = sum(counts.pageable for counts in phases)
        trained.close()
    return Costs(waits, memory, pageable, allocations)


CASES = [
    Scenario(stage, offload, "plain", ranks)
    for stage in range(4)
    for ranks in (1, 4)
    for offload in ("none", "optimizer", "delayed", "parameters")
    if (stage or offload == "none") and (stage == 3 or offload != "parameters")
]


@pytest.mark.parametrize("scenario", CASES, ids=str)
@on_ranks(1, group=False)
def test_a_steady_step(scenario):
    prepare()
    found = in_child(lambda: costs(scenario))
    assert found.pageable == 0
    assert not found.waits["backward"], found.waits
    if scenario.offload == "none":
        assert found.waits == {"forward": {}, "backward": {}, "step": {}}
    for phase, (planned, live) in found.memory.items():
        assert abs(planned - live) < SMALL_NBYTES, (phase, found.memory)
    assert found.allocations[-1] == found.allocations[-2], found.allocations
