"""Plans which state of a rank is stored outside the device, and how many bytes that takes.

Pure functions of the DeepSpeed keys ``offload_optimizer`` and ``offload_param``. The bytes equal what
:func:`zeroshard.core.stages.state_nbytes` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from zeroshard.config import Config
from zeroshard.core.layout import UnitLayout
from zeroshard.core.stages import STAGES, UnitBytes
from zeroshard.core.tiers import TIERS, Placement, Span, Tier, place
from zeroshard.device.pinned import slot_nbytes
from zeroshard.errors import UnsupportedError
from zeroshard.memory.host_memory import round_to_page
from zeroshard.offload.host_chunk import SHARED_BUFFERS, numbers_numel
from zeroshard.offload.pager import page_nbytes, slot_sizes
from zeroshard.offload.swap_file import BOUNCE_NBYTES, THREADS
from zeroshard.optim.probe import Probe
from zeroshard.precision.policy import DtypeRow

STAGING_SLOTS = 3
"""Shards on their way from disk to a device: one is read, one waits for its all-gather, one is copied."""


@dataclass(frozen=True)
class OffloadPlan:
    """Where state of this rank is stored, by name of the unit.

    ``spans``: chunks of what the rank updates, with tiers. ``params``: the tier of the unit's shard.
    ``grads``: units whose reduced gradient is stored in a tier until its update. ``sent``: units whose
    gradient is copied to the host when it is complete, and freed on the device. ``early``: those of them
    whose update may begin before the norm of the gradient is known.
    """

    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    params: Mapping[str, Tier] = field(default_factory=dict)
    rows: Mapping[str, DtypeRow] = field(default_factory=dict)  # of the trained units
    grads: Mapping[str, Tier] = field(default_factory=dict)
    sent: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is stored outside the device."""
        return bool(self.spans or self.params)

    @property
    def is_updated_off_device(self) -> bool:
        """Whether any chunk is stored, and updated, outside the device."""
        return any(span.tier is not Tier.DEVICE for spans in self.spans.values() for span in spans)

    def chunks(self) -> Iterator[tuple[str, DtypeRow, Span, int]]:
        """Each chunk of what the rank updates, in order: unit, dtypes, span and number of elements."""
        for name, spans in self.spans.items():
            for span in spans:
                yield name, self.rows[name], span, span.end - span.begin

    def spans_of(self, unit: str) -> Sequence[Span]:
        """The unit's spans; empty: all on the device."""
        return self.spans.get(unit, ())

    def tier_of(self, unit: str) -> Tier:
        """The tier of the unit's parameters."""
        return self.params.get(unit, Tier.DEVICE)


def optimizer_placement(config: Config) -> Placement | None:
    """The placement in the DeepSpeed key ``zero_optimization.offload_optimizer``; None: on the device."""
    section = config.zero_optimization.offload_optimizer
    if section is None or not STAGES[config.zero_optimization.stage].shards_optimizer:
        return None
    tier = TIERS[section.device]
    if tier is Tier.DEVICE or not section.ratio:
        return None
    return Placement(tier, section.ratio, section.max_in_cpu)


def param_placement(config: Config) -> Placement | None:
    """The placement in the DeepSpeed key ``zero_optimization.offload_param``, which needs stage 3.

    None: on the device.
    """
    section = config.zero_optimization.offload_param
    if section is None or not STAGES[config.zero_optimization.stage].shards_params:
        return None
    tier = TIERS[section.device]
    return None if tier is Tier.DEVICE else Placement(tier, host_numel=section.max_in_cpu)


def plan_offload(
    layouts: Mapping[str, UnitLayout],
    trained: Mapping[str, DtypeRow],
    config: Config,
    *,
    rank_of: Callable[[str], int],
    whole: bool,
    has_copy_streams: bool,
) -> OffloadPlan:
    """Plan what is stored where on this rank.

    ``rank_of(unit)``: the index of this rank among the holders of the unit. ``layouts``: all units in
    forward order. ``trained``: those that are updated. ``whole``: never cut a matrix, because the
    optimizer needs it whole. ``has_copy_streams``: host memory is not that of the device.
    """
    updated = {name: layouts[name] for name in trained}
    cuts = [_starts(layout, rank_of(name)) for name, layout in updated.items()] if whole else None
    spans = _placed(updated, optimizer_placement(config), cuts)
    shards = _placed(layouts, param_placement(config), [() for _ in layouts])
    tiers = {name: parts[0].tier for name, parts in shards.items() if parts}
    if not has_copy_streams:
        return OffloadPlan(spans, tiers, trained, grads=_grad_tiers(spans))
    # On a GPU host gradients wait in host memory, since their updates need them there.
    sent = frozenset[str]() if _is_delayed(config) else _sent(spans, tiers)
    return OffloadPlan(spans, tiers, trained, sent=sent, early=_early(spans, sent, config))


def _early(
    spans: Mapping[str, Sequence[Span]], sent: frozenset[str], config: Config
) -> frozenset[str]:
    """The units whose updates may begin in backward: the first ones of it, as many as have room."""
    section = config.zero_optimization.offload_optimizer
    if section is None or not section.super_offload:
        return frozenset()
    room, found = section.super_offload_numel, []
    for name in reversed([name for name in spans if name in sent]):
        numel = spans[name][-1].end
        if room is not None and numel > room:
            break
        room = None if room is None else room - numel
        found.append(name)
    return frozenset(found)


def old_state_nbytes(offload_plan: OffloadPlan, found: Mapping[torch.dtype, Probe]) -> int:
    """Host memory for the state before early updates: parameter, master, and state of their shapes."""
    return sum(
        numel * sum(dtype.itemsize for dtype in (row.param, *_updated_dtypes(row, found)))
        for name, row, _, numel in offload_plan.chunks()
        if name in offload_plan.early
    )


def _updated_dtypes(row: DtypeRow, found: Mapping[torch.dtype, Probe]) -> list[torch.dtype]:
    """The dtypes of optimizer state of the parameters' shapes, and of the master."""
    kept = [dtype for dtype in found[row.master].state.values() if dtype is not None]
    return [*kept, row.master] if row.has_master else kept


def _grad_tiers(spans: Mapping[str, Sequence[Span]]) -> dict[str, Tier]:
    """The tiers of gradients that wait where their chunks are, which have memory only in use."""
    return {
        name: parts[0].tier
        for name, parts in spans.items()
        if parts and all(part.tier.only_in_use for part in parts)
    }


def _sent(spans: Mapping[str, Sequence[Span]], params: Mapping[str, Tier]) -> frozenset[str]:
    """The units whose chunks and parameters are always in memory, and all chunks in that of the host."""
    return frozenset(
        name
        for name, parts in spans.items()
        if parts
        and all(part.tier is Tier.HOST for part in parts)
        and not params.get(name, Tier.DEVICE).only_in_use
    )


def _placed(
    layouts: Mapping[str, UnitLayout],
    placement: Placement | None,
    cuts: Sequence[Sequence[int]] | None,
) -> dict[str, Sequence[Span]]:
    """The spans of each unit's shard; none without a placement. ``cuts``: see ``place``."""
    if placement is None:
        return {}
    numels = [layout.shard_numel for layout in layouts.values()]
    return dict(zip(layouts, place(numels, placement, cuts=cuts), strict=True))


def _is_delayed(config: Config) -> bool:
    section = config.zero_optimization.offload_optimizer
    return section is not None and bool(section.delayed_update)


def grad_itemsizes(
    row: DtypeRow, *, many: bool, is_stored: bool, is_sent: bool, shards_grads: bool
) -> tuple[int, int]:
    """Bytes per element of the gradient in its buffer and in a gradient store, until the update.

    0: there is none. ``many``: several micro-batches are summed before an update. At stage 1 each rank
    sums the whole gradient itself, and that sum stays in memory until it is reduced. ``is_sent``: see
    :class:`OffloadPlan`; such a gradient is counted with the copy buffers.
    """
    summed = (row.grad_accum if many else row.reduce).itemsize
    if is_sent:
        return summed if many else 0, 0
    if not is_stored:
        return summed, 0
    if shards_grads:
        return 0, summed
    return summed if many else 0, row.reduce.itemsize


def check_device(offload_plan: OffloadPlan, *, has_copy_streams: bool) -> None:
    """Refuse a plan with parameters off the GPU and their optimizer state on it.

    Raises:
        UnsupportedError: ``offload_plan`` has such a unit.
    """
    if not has_copy_streams:
        return
    for name in offload_plan.rows:
        spans = offload_plan.spans_of(name)
        on_device = not spans or any(span.tier is Tier.DEVICE for span in spans)
        if offload_plan.tier_of(name) is not Tier.DEVICE and on_device:
            raise UnsupportedError(
                f"unit {name!r}: offload_param stores its parameters in host memory or on disk, "
                "but its optimizer state would stay on the GPU. Then every step would copy the "
                'parameters to the GPU and back once more. Set offload_optimizer.device to "cpu" '
                'or "nvme" with ratio 1, or remove offload_param.'
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


def page_sizes(
    offload_plan: OffloadPlan, found: Mapping[torch.dtype, Probe]
) -> Iterator[tuple[Tier, int]]:
    """The tier of each chunk that has memory only in use, and an upper bound on its bytes.

    In the order in which the chunks are made and updated, that of forward.
    """
    for _, row, span, numel in offload_plan.chunks():
        if span.tier.only_in_use:
            yield span.tier, page_nbytes(numel, _updated_dtypes(row, found))


def disk_buffer_nbytes(
    units: Iterable[UnitBytes],
    offload_plan: OffloadPlan,
    found: Mapping[torch.dtype, Probe],
    *,
    shards_params: bool,
    has_copy_streams: bool,
) -> int:
    """Host memory through which state on disk passes: pages, slots for shards, and what aligns memory.

    A shard passes through a slot on its way to a device with other memory (``has_copy_streams``).
    """
    pages = slot_sizes([nbytes for _, nbytes in page_sizes(offload_plan, found)])
    shard = max(
        (
            unit.param_nbytes * unit.layout.shard_numel
            for unit in units
            if shards_params and unit.param_tier.only_in_use
        ),
        default=0,
    )
    slots = STAGING_SLOTS * slot_nbytes(shard, torch.uint8) if has_copy_streams else 0
    tiers = [*offload_plan.grads.values(), *offload_plan.params.values()]
    bounces = THREADS * BOUNCE_NBYTES if any(tier.only_in_use for tier in tiers) else 0
    return sum(map(round_to_page, pages)) + round_to_page(slots) + bounces


def shared_nbytes(offload_plan: OffloadPlan) -> tuple[int, int]:
    """Bytes of gradient and device parameter of the largest chunk with memory only in use; 0 without one.

    Such chunks share buffers (:class:`zeroshard.offload.host_chunk.HostBuffers`).
    """
    itemsize, grad_nbytes, param_nbytes = grad_itemsize(offload_plan), 0, 0
    for name, row, span, numel in offload_plan.chunks():
        if span.tier.only_in_use:
            grad_nbytes = max(grad_nbytes, numel * itemsize)
            if offload_plan.tier_of(name) is Tier.DEVICE:
                param_nbytes = max(param_nbytes, numel * row.param.itemsize)
    return grad_nbytes, param_nbytes


def host_sizes(offload_plan: OffloadPlan) -> Iterator[tuple[str, int, torch.dtype]]:
    """Pinned memory that a GPU needs: ledger category ("master" or "scratch"), elements and dtype."""
    itemsize, compared = grad_itemsize(offload_plan), 0
    for name, row, span, numel in offload_plan.chunks():
        if span.tier is Tier.DEVICE:
            continue
        if not span.tier.only_in_use:
            yield "scratch", numel * itemsize, torch.uint8
            if offload_plan.tier_of(name) is Tier.DEVICE:
                yield "scratch", numel * row.param.itemsize, torch.uint8
                compared += 1
        if span.tier is Tier.HOST and row.has_master:
            yield "master", numel, row.master
    if offload_plan.is_updated_off_device:
        for nbytes in shared_nbytes(offload_plan):
            for _ in range(SHARED_BUFFERS if nbytes else 0):
                yield "scratch", nbytes, torch.uint8
        away = sum(tier is not Tier.DEVICE for tier in offload_plan.params.values())
        yield "scratch", numbers_numel(away, compared), torch.float64
    if offload_plan.early:
        yield "scratch", 1, torch.float64  # the factor that they assume
