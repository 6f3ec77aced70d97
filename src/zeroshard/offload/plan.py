"""Plans which state of a rank is stored outside the device, and how many bytes that takes.

Pure functions of the DeepSpeed keys ``offload_optimizer`` and ``offload_param``. The bytes equal what
:func:`zeroshard.core.nbytes.state_nbytes` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout
from zeroshard.core.stages import STAGES
from zeroshard.core.tiers import Placement, Span, Tier, place
from zeroshard.errors import UnsupportedError
from zeroshard.offload.pager import page_nbytes
from zeroshard.optim.factory import Probe
from zeroshard.precision.policy import DtypeRow

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}


@dataclass(frozen=True)
class OffloadPlan:
    """Where state of this rank is stored, by name of the unit.

    ``spans``: chunks of what the rank updates, with tiers. ``params``: the tier of the unit's shard.
    ``grads``: units whose reduced gradient is stored on disk until its update.
    """

    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    params: Mapping[str, Tier] = field(default_factory=dict)
    rows: Mapping[str, DtypeRow] = field(default_factory=dict)  # of the trained units
    grads: frozenset[str] = frozenset()

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is stored outside the device."""
        return bool(self.spans or self.params)

    def spans_of(self, unit: str) -> Sequence[Span]:
        """The unit's spans; empty: all on the device."""
        return self.spans.get(unit, ())

    def tier_of(self, unit: str) -> Tier:
        """The tier of the unit's parameters."""
        return self.params.get(unit, Tier.DEVICE)


def optimizer_placement(config: Config) -> Placement:
    """The placement in the DeepSpeed key ``zero_optimization.offload_optimizer``."""
    section = config.zero_optimization.offload_optimizer
    if section is None or not STAGES[config.zero_optimization.stage].shards_optimizer:
        return Placement()
    return Placement(_TIERS[section.device], section.ratio, section.max_in_cpu)


def param_placement(config: Config) -> Placement:
    """The placement in the DeepSpeed key ``zero_optimization.offload_param``, which needs stage 3."""
    section = config.zero_optimization.offload_param
    if section is None or not STAGES[config.zero_optimization.stage].shards_params:
        return Placement()
    return Placement(_TIERS[section.device], host_numel=section.max_in_cpu)


def plan_offload(
    layouts: Mapping[str, UnitLayout],
    trained: Mapping[str, DtypeRow],
    config: Config,
    *,
    rank: int,
    whole: bool,
    has_bus: bool,
) -> OffloadPlan:
    """Plan what is stored where on ``rank``.

    ``layouts``: all units in forward order. ``trained``: those that are updated. ``whole``: never cut a
    matrix, because the optimizer needs it whole. ``has_bus``: host memory is not the device's memory.
    """
    optimizer, params = optimizer_placement(config), param_placement(config)
    spans: dict[str, Sequence[Span]] = {}
    if optimizer.is_offloaded:
        chosen = {name: layouts[name] for name in trained}
        numels = [layout.shard_numel for layout in chosen.values()]
        cuts = [_starts(layout, rank) for layout in chosen.values()] if whole else None
        spans = dict(zip(chosen, place(numels, optimizer, cuts=cuts), strict=True))
    tiers = {}
    if params.is_offloaded:
        numels = [layout.shard_numel for layout in layouts.values()]
        placed = place(numels, params, cuts=[() for _ in numels])
        tiers = {name: parts[0].tier for name, parts in zip(layouts, placed, strict=True) if parts}
    on_disk = {name for name, parts in spans.items() if _all_on_disk(parts)}
    # On a GPU host gradients wait in host memory, since their updates need them there.
    return OffloadPlan(spans, tiers, trained, frozenset() if has_bus else frozenset(on_disk))


def _all_on_disk(spans: Sequence[Span]) -> bool:
    return bool(spans) and all(span.tier is Tier.DISK for span in spans)


def grad_itemsizes(
    row: DtypeRow, *, many: bool, on_disk: bool, shards_grads: bool
) -> tuple[int, int]:
    """Bytes per element of the gradient in memory and of the one on disk, between reduction and update.

    0: there is none. ``many``: several micro-batches are summed before an update. At stage 1 each rank
    sums the whole gradient itself, and that sum stays in memory until it is reduced.
    """
    summed = (row.grad_accum if many else row.reduce).itemsize
    if not on_disk:
        return summed, 0
    if shards_grads:
        return 0, summed
    return summed if many else 0, row.reduce.itemsize


def check_device(offload_plan: OffloadPlan, device: torch.device) -> None:
    """Refuse a plan with parameters off the GPU and their optimizer state on it.

    Raises:
        UnsupportedError: ``offload_plan`` has such a unit.
    """
    if device.type == "cpu":
        return
    for name in offload_plan.rows:
        spans = offload_plan.spans_of(name)
        on_device = not spans or any(span.tier is Tier.DEVICE for span in spans)
        if offload_plan.tier_of(name) is not Tier.DEVICE and on_device:
            raise UnsupportedError(
                f"unit {name!r}: offload_param moves its parameters off the GPU, and its optimizer state "
                "would stay there: every step would carry the parameters over the bus twice more. Set "
                'offload_optimizer.device to "cpu" or "nvme" with ratio 1, or drop offload_param.'
            )


def _starts(layout: UnitLayout, rank: int) -> list[int]:
    """Positions in the rank's shard where parameters start."""
    low, high = layout.shard_range(rank)
    return [slot.start - low for slot in layout.slots if low < slot.start < high]


def shaped_state(probe: Probe, group: int) -> dict[str, torch.dtype]:
    """The optimizer state of the parameter's shape for a param group: dtype by name."""
    kept = probe.state_by_group[group]
    return {name: dtype for name, dtype in kept.items() if dtype is not None}


def grad_itemsize(offload_plan: OffloadPlan) -> int:
    """Bytes of the widest element that a gradient can have. One that a program sets is in fp32."""
    rows = offload_plan.rows.values()
    return max([4, *(d.itemsize for row in rows for d in (row.reduce, row.grad_accum))])


def page_sizes(offload_plan: OffloadPlan, found: Mapping[torch.dtype, Probe]) -> Iterator[int]:
    """Upper bounds on the bytes of each chunk on disk."""
    for name, spans in offload_plan.spans.items():
        row = offload_plan.rows[name]
        kept = [dtype for dtype in found[row.master].state.values() if dtype is not None]
        dtypes = [*kept, row.master] if row.has_master else kept
        for span in spans:
            if span.tier is Tier.DISK:
                yield page_nbytes(span.end - span.begin, dtypes)


def host_sizes(offload_plan: OffloadPlan) -> Iterator[tuple[str, int, torch.dtype]]:
    """Pinned memory that a GPU needs: ledger category ("master" or "scratch"), elements and dtype."""
    itemsize, widest = grad_itemsize(offload_plan), {"grad": 0, "low": 0}
    for name, spans in offload_plan.spans.items():
        row = offload_plan.rows[name]
        for span in spans:
            numel = span.end - span.begin
            if span.tier is Tier.DEVICE:
                continue
            yield "scratch", 3, torch.float64
            host_chunk = {"grad": numel * itemsize, "low": numel * row.param.itemsize}
            for what, nbytes in host_chunk.items():
                # Chunks on disk share one buffer; one longer than those before allocates a new one.
                if span.tier is Tier.HOST or nbytes > widest[what]:
                    yield "scratch", nbytes, torch.uint8
                if span.tier is Tier.DISK:
                    widest[what] = max(widest[what], nbytes)
            if span.tier is Tier.HOST and row.has_master:
                yield "master", numel, row.master
