"""The state that each ZeRO stage shards, and how many bytes of it a rank holds.

The stages are four rows of data. The code of a step reads these rows and does not compare stage numbers.
The bytes are those of the formula of the ZeRO paper (section 3.1 and figure 1), with the padding of the
real layout: 16 bytes per parameter for 16-bit Adam, of which a stage keeps 1/W of some parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from zeroshard.core.layout import UnitLayout
from zeroshard.core.ledger import RESTING, Key
from zeroshard.core.tiers import TIERS, Span, Tier


@dataclass(frozen=True, slots=True)
class Stage:
    """One row of the ZeRO table (ZeRO paper, section 5; DeepSpeed key ``zero_optimization.stage``).

    >>> STAGES[2].shards_grads, STAGES[2].volume
    (True, 2)
    """

    number: int
    shards_optimizer: bool
    shards_grads: bool
    shards_params: bool

    @property
    def volume(self) -> int:
        """Elements that pass through collectives per step, as a multiple of the model's size.

        Below stage 3: a reduce-scatter and an all-gather. At stage 3: one more all-gather (ZeRO paper,
        section 7).
        """
        return 3 if self.shards_params else 2


STAGES = {  #        optimizer  gradients  parameters
    0: Stage(0, False, False, False),
    1: Stage(1, True, False, False),
    2: Stage(2, True, True, False),
    3: Stage(3, True, True, True),
}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Optimizer state of one parameter: bytes per element, and per fragment (a step count)."""

    element_nbytes: int
    piece_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What is needed of one unit to plan its bytes. Sizes are bytes per element.

    ``state``: optimizer state by name, of every parameter that the optimizer updates. ``spans``: tiers of
    this rank's master and state; empty: all on the device. ``param_tier``: the tier of the parameters.
    ``grad_nbytes``: gradients that wait on the device for the update or for further micro-batches.
    ``stored_grad_nbytes``: reduced gradients that wait in ``grad_tier``. ``group``: that of units that
    are gathered and reduced together; "": it is alone. ``second_nbytes``: what a rank keeps at stage 3
    beside its shard, the shards of other nodes. ``node_sum_nbytes``: what the sums of a node have more
    than ``grad_nbytes`` counts, until they pass between nodes.
    """

    layout: UnitLayout
    param_nbytes: int
    grad_nbytes: int = 0
    stored_grad_nbytes: int = 0
    grad_tier: Tier = Tier.DEVICE
    master_nbytes: int = 0  # 0: the parameter is its own master
    state: Mapping[str, StateBytes] = field(default_factory=dict)
    spans: Sequence[Span] = ()
    param_tier: Tier = Tier.DEVICE
    # Of this process among the unit's own holders; None: as for other units.
    rank: int | None = None
    group: str = ""
    second_nbytes: int = 0
    node_sum_nbytes: int = 0


def state_nbytes(units: Iterable[UnitBytes], stage: Stage, rank: int) -> dict[Key, int]:
    """Planned bytes of ``rank`` between steps, by category (those of ``RESTING``) and tier.

    Optimizer state has no padding, since it follows the fragments of the updated parameters. For a
    parameter that never gets a gradient, the planned state is never allocated. Step counts stay in host
    memory unless the state is on the device.

    >>> from zeroshard.core.layout import pack
    >>> from zeroshard.core.stages import STAGES
    >>> layout = pack([("w", (128, 64))], num_shards=2)
    >>> adam = UnitBytes(layout, 2, 2, master_nbytes=4, state={"w": StateBytes(8)})
    >>> [sum(state_nbytes([adam], STAGES[n], rank=0).values()) / 8192 for n in range(4)]
    [16.0, 10.0, 9.0, 8.0]
    """
    total = {(category, tier): 0 for category in RESTING for tier in TIERS.values()}
    for unit in units:
        layout = unit.layout
        full, shard = layout.full_numel, layout.shard_numel
        place = rank if unit.rank is None else unit.rank
        low, high = layout.shard_range(place) if stage.shards_optimizer else (0, full)
        held = shard if stage.shards_params else full
        total["parameters", unit.param_tier] += unit.param_nbytes * held
        total["parameters", Tier.DEVICE] += unit.second_nbytes
        total["gradients", Tier.DEVICE] += unit.grad_nbytes * (
            shard if stage.shards_grads else full
        )
        total["gradients", Tier.DEVICE] += unit.node_sum_nbytes
        total["gradients", unit.grad_tier] += unit.stored_grad_nbytes * shard
        for span in unit.spans or (Span(0, high - low, Tier.DEVICE),):
            total["master", span.tier] += unit.master_nbytes * (span.end - span.begin)
            counts = Tier.DEVICE if span.tier is Tier.DEVICE else Tier.HOST
            for fragment in layout.fragments_between(low + span.begin, low + span.end):
                if (state := unit.state.get(fragment.fqn)) is not None:
                    total["optimizer", span.tier] += state.element_nbytes * fragment.numel
                    total["optimizer", counts] += state.piece_nbytes
    return total
