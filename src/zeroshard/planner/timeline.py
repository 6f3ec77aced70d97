"""What the device holds over a step, in few moments that keep the highest ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from zeroshard.core.tiers import Tier
from zeroshard.planner.allocations import Held
from zeroshard.planner.step_log import StepEvent

MOMENTS = 240
"""Moments of a timeline."""


def timeline(events: Iterable[StepEvent], count: int = MOMENTS) -> list[tuple[int, Held]]:
    """The highest of each of ``count`` runs of consecutive allocations, with its number in the step.

    A run ends where a phase does, so there may be some more.
    """
    all_held = [event for event in events if isinstance(event, Held)]
    size = max(1, math.ceil(len(all_held) / count))
    found: list[tuple[int, Held]] = []
    begin = 0
    for at, held in enumerate(all_held):
        last = at + 1 == len(all_held)
        if last or at + 1 - begin == size or all_held[at + 1].phase != held.phase:
            highest = max(range(begin, at + 1), key=lambda n: all_held[n].device_nbytes)
            found.append((highest, all_held[highest]))
            begin = at + 1
    return found


def columns(points: list[tuple[int, Held]]) -> dict[str, Any]:
    """A timeline as columns of equal length, for JSON.

    ``held``: bytes of each category of the device, and ``away`` of those in other tiers, by
    "category, tier". What no category has is ``others``.
    """
    device = Tier.DEVICE.name
    keys = list(dict.fromkeys(key for _, held in points for key, n in held.held.items() if n))
    return {
        "allocation": [at for at, _ in points],
        "phase": [held.phase for _, held in points],
        "device_nbytes": [held.device_nbytes for _, held in points],
        "others": [held.activations_nbytes for _, held in points],
        "held": {
            category: [held.held.get((category, tier), 0) for _, held in points]
            for category, tier in keys
            if tier == device
        },
        "away": {
            f"{category}, {tier}": [held.held.get((category, tier), 0) for _, held in points]
            for category, tier in keys
            if tier != device
        },
    }


def blocks(points: list[tuple[int, Held]]) -> str:
    """A timeline as one character for each moment, eight heights up to the peak.

    A space separates phases.
    """
    top = max((held.device_nbytes for _, held in points), default=0) or 1
    drawn, before = "", ""
    for _, held in points:
        if before and held.phase != before:
            drawn += " "
        before = held.phase
        drawn += "▁▂▃▄▅▆▇█"[min(7, 8 * held.device_nbytes // top)]
    return drawn
