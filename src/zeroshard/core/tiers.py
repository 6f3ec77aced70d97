"""Assigns each part of a rank's state a tier: device memory, host memory or disk (ADR 0008).

This choice is independent of the stage (ZeRO-Offload, arXiv 2101.06840; ZeRO-Infinity, arXiv 2104.07857).
Pure arithmetic. The plan and the running step use the same functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from zeroshard.core.layout import ALIGNMENT, round_up

CHUNK_NUMEL = 2**21
"""Elements of a chunk on disk, which are read, updated and written together.

24 MB for Adam with 16-bit parameters: three disk blocks of 8 MB. The few that are in memory at a time are
small compared with a unit.
"""


class Tier(Enum):
    """A kind of memory. On CPU ranks ``DEVICE`` and ``HOST`` are two names of the same memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Placement:
    """Stores the share ``ratio`` of one kind of state in ``tier``, and the rest on the device.

    ``host_numel``: elements per rank that stay in host memory when ``tier`` is the disk.
    """

    tier: Tier = Tier.DEVICE
    ratio: float = 1.0
    host_numel: int = 0

    @property
    def is_offloaded(self) -> bool:
        """Whether anything is stored outside the device."""
        return self.tier is not Tier.DEVICE and self.ratio > 0


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
    overlaps with no computation. The next units get host memory, the last ones the disk. Spans end at
    multiples of 64 elements, so no bit of an update depends on its tier. On disk they have at most
    ``CHUNK_NUMEL`` elements.

    ``cuts``: for each unit, the only positions at which it may be cut (for optimizers of whole matrices).

    >>> place([128, 256], Placement(Tier.HOST, ratio=0.5))
    [[Span(begin=0, end=128, tier=<Tier.DEVICE: 'device'>)], [Span(begin=0, end=64, \
tier=<Tier.DEVICE: 'device'>), Span(begin=64, end=256, tier=<Tier.HOST: 'host'>)]]
    """
    total = sum(numels)
    device_numel = total
    if placement.tier is not Tier.DEVICE:
        device_numel = round_up(total - int(placement.ratio * total), ALIGNMENT)
    host_numel = total
    if placement.tier is Tier.DISK:
        host_numel = device_numel + round_up(placement.host_numel, ALIGNMENT)
    allowed = list(cuts) if cuts is not None else [None] * len(numels)
    placed, at = [], 0
    for numel, positions in zip(numels, allowed, strict=True):
        bounds = [
            (device_numel - at, Tier.DEVICE),
            (host_numel - at, Tier.HOST),
            (numel, Tier.DISK),
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
        step = CHUNK_NUMEL if tier is Tier.DISK else max(1, numel)
        while begin < stop:
            end = min(begin + step, stop)
            if positions is not None:  # the last cut in reach; one matrix may be longer
                fitting = [p for p in positions if begin < p <= stop]
                end = max((p for p in fitting if p <= end), default=min(fitting, default=stop))
            spans.append(Span(begin, end, tier))
            begin = end
    return spans
