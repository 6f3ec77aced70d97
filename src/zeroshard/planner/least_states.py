"""The least that a rank holds between steps in another stage, by arithmetic on a simulated rank."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.stages import STAGES, Stage
from zeroshard.core.tiers import Tier
from zeroshard.planner.candidates import Strategy
from zeroshard.planner.simulated import Simulation

SURE = 0.9
"""The part of the result that is certain: padding of shards, which grows with the ranks, is less."""

OFFLOADED = ("master", "optimizer", "gradients")
"""What offload of the optimizer takes away from the device."""


def least_states_nbytes(
    stages: Sequence[Simulation],
    found_stage: int,
    strategy: Strategy,
    tensor: int,
    pipeline: int,
    expert: int,
) -> int:
    """Bytes of parameters, masters and optimizer state on the device with ``strategy``.

    ``stages``: a rank of each pipeline stage in ``found_stage``. ``tensor``, ``pipeline`` and ``expert``:
    of the rank in question. More tensor ranks divide each parameter at most by their number, and fewer
    leave it as large or larger. If ``expert`` ranks share experts, a rank that shards nothing holds as
    little as that part of all parameters, which may all be experts. Of P pipeline stages one has a P-th
    of the parameters or more. What several stages have may be tied weights, so from them nothing follows
    for other numbers of stages. Gradients do not count: without accumulation there may be none between
    steps.
    """
    mesh = stages[0].mesh
    if len(stages) not in (1, pipeline):
        return 0
    before, after = STAGES[found_stage], STAGES[strategy.stage]
    ranks = mesh.data_shard
    now = max(1, ranks * mesh.tensor * mesh.pipeline // (tensor * pipeline))
    part = min(1.0, mesh.tensor / tensor) / pipeline
    nbytes = 0.0
    for category in ("parameters", "master", "optimizer"):
        away = strategy.params if category == "parameters" else strategy.optimizer
        if not away:
            rows = [row for found in stages for row in found.memory if row.category == category]
            own = sum(row.measured for row in rows)
            if _is_sharded(after, category):
                nbytes += part * own * (ranks if _is_sharded(before, category) else 1) / now
            elif _is_sharded(before, category):
                nbytes += part * own * ranks / expert
            else:
                nbytes += part * own * min(1.0, mesh.expert / expert)
    return int(SURE * nbytes)


def _is_sharded(stage: Stage, category: str) -> bool:
    return stage.shards_params if category == "parameters" else stage.shards_optimizer


def offloadable_nbytes(found: Simulation, strategy: Strategy) -> int:
    """The most bytes of a simulated rank's device that ``strategy`` puts elsewhere."""
    names = (*OFFLOADED, *(("parameters", "gathered") if strategy.params else ()))
    tier = Tier.DEVICE.name
    return sum(r.measured for r in found.memory if r.category in names and r.tier == tier)
