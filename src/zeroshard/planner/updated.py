"""The bytes that the update of a rank moves in a step."""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.core.tiers import Tier
from zeroshard.engine.engine import Engine


@dataclass(frozen=True)
class Updated:
    """Bytes that the update of a rank reads and writes in a step, and those that offload moves.

    ``nbytes``: gradients (read; twice if their norm is measured), states, masters and parameters (read
    and written). ``tier``: of the optimizer state, where the update runs. ``gradient_nbytes`` and
    ``param_nbytes``: that leave the device for it, and come back. ``state_nbytes``: of states and
    masters.
    """

    nbytes: int
    tier: str
    gradient_nbytes: int
    param_nbytes: int
    state_nbytes: int


def updated_by(engine: Engine) -> Updated:
    """What the update of this rank moves. Optimizer state must exist: take a step before."""
    rows = engine.memory_report().rows
    kept = [row for row in rows if row.category in ("master", "optimizer")]
    state = sum(row.measured for row in kept)
    has_master = any(row.category == "master" and row.measured for row in rows)
    tiers = [row.tier for row in kept if row.measured] or [Tier.DEVICE.name]
    params = grads = 0
    for unit in engine.runtime.units:
        if unit.trainable:
            whole = not engine.runtime.stage.shards_optimizer
            numel = unit.layout.full_numel if whole else unit.layout.shard_numel
            params += numel * unit.row.param.itemsize
            grads += numel * unit.row.reduce.itemsize
    passes = 2 if engine.settings.zero_optimization.compute_grad_norm else 1
    nbytes = 2 * state + passes * grads + (1 if has_master else 2) * params
    return Updated(nbytes, tiers[-1], grads, params, state)
