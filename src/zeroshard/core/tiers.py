"""The tiers, and which part of a rank's state is stored in which: device, host or disk (ADR 0008).

This choice is independent of the stage (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
Pure arithmetic. The plan and the running step use the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from zeroshard.core.layout import ALIGNMENT, round_up

CHUNK_NUMEL = 2**21
"""Elements of a chunk on disk, which are read, updated and written together.

24 MB for Adam with 16-bit parameters: three disk blocks of 8 MB. The few that are in memory at a time are
small compared with a unit.
"""


@dataclass(frozen=True, slots=True)
class Tier:
    """A kind of memory: one row of :data:`TIERS`.

    ``name``: its column in the memory report. ``made_by``: ``module:name`` of its subclass of
    :class:`~zeroshard.offload.tier_stores.TierStores`, as text, since this package imports no torch.
    ``only_in_use``: state has memory only while it is in use. It is then read and written in chunks, and
    gradients wait in the tier, too. ``needs_path``: the configuration must name a directory, whose free
    space is checked. State in other tiers counts as host memory when that is checked.
    """

    DEVICE: ClassVar[Tier]
    HOST: ClassVar[Tier]
    DISK: ClassVar[Tier]

    name: str
    made_by: str
    only_in_use: bool = False
    needs_path: bool = False

    def __repr__(self) -> str:
        return f"<tier {self.name}>"


Tier.DEVICE = Tier("device", "zeroshard.offload.tier_stores:TierStores")
Tier.HOST = Tier("host", "zeroshard.offload.tier_stores:HostStores")
Tier.DISK = Tier(
    "disk", "zeroshard.offload.disk_stores:DiskStores", only_in_use=True, needs_path=True
)

TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.DISK}
"""Every tier, by the value of ``device`` in ``offload_optimizer`` and ``offload_param``. On CPU ranks the
first two are the same memory."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Stores the share ``ratio`` of one kind of state in ``tier``, and the rest on the device.

    ``host_numel``: elements per rank that stay in host memory when ``tier`` is neither it nor the device.
    """

    tier: Tier = Tier.DEVICE
    ratio: float = 1.0
    host_numel: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """Elements ``begin`` to ``end`` of what a rank holds of one unit, and their tier."""

    begin: int
    end: int
    tier: Tier


def place(
    numels: Sequence[int], placement: Placement, *, cuts: Iterable[Sequence[int]] | None = None
) -> list[list[Span]]:
    """The spans of units with ``numels`` elements each, in forward order.

    The device gets the state of the first units of forward. Backward finishes them last, so their update
    overlaps with no computation. The next units get host memory, the last ones the tier of the placement.
    Spans end at multiples of 64 elements, so no bit of an update depends on its tier. On disk they have
    at most ``CHUNK_NUMEL`` elements.

    ``cuts``: for each unit, the only positions at which it may be cut (for optimizers of whole matrices).

    >>> place([128, 256], Placement(Tier.HOST, ratio=0.5))
    [[Span(begin=0, end=128, tier=<tier device>)], [Span(begin=0, end=64, tier=<tier device>), \
Span(begin=64, end=256, tier=<tier host>)]]
    """
    total = sum(numels)
    device_numel = total
    if placement.tier is not Tier.DEVICE:
        device_numel = round_up(total - int(placement.ratio * total), ALIGNMENT)
    host_numel = total
    if placement.tier not in (Tier.DEVICE, Tier.HOST):
        host_numel = device_numel + round_up(placement.host_numel, ALIGNMENT)
    allowed = list(cuts) if cuts is not None else [None] * len(numels)
    placed, at = [], 0
    for numel, positions in zip(numels, allowed, strict=True):
        bounds = [
            (device_numel - at, Tier.DEVICE),
            (host_numel - at, Tier.HOST),
            (numel, placement.tier),
        ]
        placed.append(_spans(numel, bounds, positions))
        at += numel
    return placed


def _spans(
    numel: int, bounds: Iterable[tuple[int, Tier]], positions: Sequence[int] | None
) -> list[Span]:
    spans: list[Span] = []
    begin = 0
    for bound, tier in bounds:
        stop = min(max(bound, begin), numel)
        if positions is not None and stop < numel:
            stop = max((p for p in positions if begin <= p <= stop), default=begin)
        step = CHUNK_NUMEL if tier.only_in_use else max(1, numel)
        while begin < stop:
            end = min(begin + step, stop)
            if positions is not None:  # the last cut in reach; one matrix may be longer
                fitting = [p for p in positions if begin < p <= stop]
                end = max((p for p in fitting if p <= end), default=min(fitting, default=stop))
            spans.append(Span(begin, end, tier))
            begin = end
    return spans
