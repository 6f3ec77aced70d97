"""How many bytes does a rank hold of each training state?

The formula of the ZeRO paper (section 3.1 and figure 1), with the padding that the layout really has:
16 bytes per parameter for 16-bit Adam, of which a stage keeps 1/W of some parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zeroshard.core.layout import UnitLayout
from zeroshard.core.ledger import RESTING
from zeroshard.core.stages import Stage


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Optimizer state of one parameter: bytes per element, and per piece of it (a step count)."""

    element_nbytes: int
    piece_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What has to be known of one unit to plan its bytes. Sizes are per element.

    ``state``: by name, for every parameter that the optimizer updates.
    """

    layout: UnitLayout
    param_nbytes: int
    grad_nbytes: int = 0  # 0: frozen
    master_nbytes: int = 0  # 0: the parameter is its own master
    state: Mapping[str, StateBytes] = field(default_factory=dict)


def state_nbytes(units: Iterable[UnitBytes], stage: Stage, rank: int) -> dict[str, int]:
    """Planned resting bytes of ``rank`` per category: parameters, gradients, master, optimizer.

    Optimizer state has no padding: it follows the fragments of the optimized parameters. A parameter
    that never gets a gradient never gets the state planned for it.

    >>> from zeroshard.core.layout import pack
    >>> from zeroshard.core.stages import STAGES
    >>> adam = UnitBytes(pack([("w", (128, 64))], world_size=2), 2, 2, 4, {"w": StateBytes(8)})
    >>> [sum(state_nbytes([adam], STAGES[n], rank=0).values()) / 8192 for n in range(4)]
    [16.0, 10.0, 9.0, 8.0]
    """
    total = dict.fromkeys(RESTING, 0)
    for unit in units:
        layout = unit.layout
        full, shard = layout.full_numel, layout.shard_numel
        low, high = layout.shard_range(rank) if stage.shards_optimizer else (0, full)
        total["parameters"] += unit.param_nbytes * (shard if stage.shards_params else full)
        total["gradients"] += unit.grad_nbytes * (shard if stage.shards_grads else full)
        total["master"] += unit.master_nbytes * (high - low)
        for fragment in layout.fragments_between(low, high):
            if (state := unit.state.get(fragment.fqn)) is not None:
                total["optimizer"] += state.element_nbytes * fragment.numel + state.piece_nbytes
    return total
