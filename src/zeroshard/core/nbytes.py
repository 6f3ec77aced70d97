"""How many bytes does a rank hold of each training state?

The formula of the ZeRO paper (section 3.1 and figure 1), with the padding that the layout really has:
16 bytes per parameter for 16-bit Adam, of which a stage keeps 1/W of some parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zeroshard.core.layout import UnitLayout
from zeroshard.core.stages import Stage


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What has to be known of one unit to plan its bytes. Sizes are per element."""

    layout: UnitLayout
    param_nbytes: int
    grad_nbytes: int  # 0: frozen
    master_nbytes: int  # 0: the parameter is its own master
    state_nbytes: int  # optimizer state shaped like the parameter; 0: none
    state_scalar_nbytes: int = 0  # optimizer state once per parameter fragment (a step count)
    optimized: frozenset[str] = frozenset()  # parameters that the optimizer updates


def state_nbytes(units: Iterable[UnitBytes], stage: Stage, rank: int) -> dict[str, int]:
    """Planned resting bytes of ``rank`` per category: parameters, gradients, master, optimizer.

    Optimizer state has no padding: it follows the fragments of the optimized parameters.
    """
    total = dict.fromkeys(("parameters", "gradients", "master", "optimizer"), 0)
    for unit in units:
        layout = unit.layout
        full, shard = layout.full_numel, layout.shard_numel
        owned = layout.shard_range(rank) if stage.shards_optimizer else (0, full)
        fragments = [f for f in layout.fragments_between(*owned) if f.fqn in unit.optimized]
        total["parameters"] += unit.param_nbytes * (shard if stage.shards_params else full)
        total["gradients"] += unit.grad_nbytes * (shard if stage.shards_grads else full)
        total["master"] += unit.master_nbytes * (owned[1] - owned[0])
        total["optimizer"] += unit.state_nbytes * sum(f.numel for f in fragments)
        total["optimizer"] += unit.state_scalar_nbytes * len(fragments)
    return total
