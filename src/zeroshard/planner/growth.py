"""What is known of a configuration by arithmetic on the simulation of another one.

How a step grows with the micro-batch, what the model alone takes of it, and the least that a rank holds
between steps in another stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zeroshard.core.stages import STAGES, Stage
from zeroshard.core.tiers import Tier
from zeroshard.planner.candidates import Strategy
from zeroshard.planner.prices import Grown
from zeroshard.planner.simulated import Simulation
from zeroshard.planner.step_log import (
    MESSAGE,
    Begun,
    Ended,
    Operation,
    StepEvent,
    Work,
    along,
    is_of_layers,
)

LOW, HIGH = 2, 3
"""Samples of the micro-batches between which lines are drawn. With one sample some operations differ."""


@dataclass(frozen=True)
class Growth:
    """How a step grows with each sample of the micro-batch. By phase: bytes; by operation: work.

    ``layers``: by the bytes of a collective of layers or of a message between pipeline stages with
    ``LOW`` samples, those with ``HIGH``.
    """

    phases: Mapping[str, int]
    works: Mapping[Work, Work]
    layers: Mapping[int, int]

    @classmethod
    def between(cls, low: Simulation, high: Simulation) -> Growth:
        """From the same kind with ``LOW`` and ``HIGH`` samples."""
        before, after = _works(low.events), _works(high.events)
        same = [w.op for w in before] == [w.op for w in after]
        pairs = zip(before, after, strict=True) if same else ()
        return cls(
            {
                name: moment.device_nbytes - low.moments[name].device_nbytes
                for name, moment in high.moments.items()
            },
            dict(pairs) if same else {work: _grown(work) for work in before},
            _grown_layers(low.events, high.events),
        )

    def at(self, size: int) -> Grown:
        """A step with ``size`` samples."""
        return Grown(self.works, self.layers, (size - LOW) / (HIGH - LOW))


def _grown(work: Work) -> Work:
    """``HIGH`` samples instead of ``LOW``, if all of an operation grows with them."""
    nothing = Work(work.op, work.kind, 0, work.dtype, 0, 0, 0, 0)
    return along(nothing, work, HIGH / LOW)


def _grown_layers(low: Sequence[StepEvent], high: Sequence[StepEvent]) -> dict[int, int]:
    before, after = (
        [e.nbytes for e in events if isinstance(e, Begun) and e.grows] for events in (low, high)
    )
    if len(before) != len(after):  # other operations: all of it grows
        return {nbytes: nbytes * HIGH // LOW for nbytes in before}
    return dict(zip(before, after, strict=True))


def _works(events: Sequence[StepEvent]) -> list[Work]:
    return [e.work for e in events if isinstance(e, Operation) and e.phase != "step"]


def without_engine(found: Simulation, *, with_update: bool) -> Simulation:
    """A step without collectives of the engine, and without its update if that is not wanted.

    Collectives that layers call stay, and so do messages between pipeline stages.
    """
    kept: list[StepEvent] = []
    starts = []
    messages = {e.key for e in found.events if isinstance(e, Begun) and e.op == MESSAGE}
    for at, event in enumerate(found.events):
        if at in found.starts:
            starts.append(len(kept))
        if isinstance(event, Operation):
            if event.phase != "step" or with_update:
                kept.append(event)
        elif isinstance(event, (Begun, Ended)) and (
            is_of_layers(event.key) or event.key in messages
        ):
            kept.append(event)
    return replace(found, events=tuple(kept), starts=tuple(starts))


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
