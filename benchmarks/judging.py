"""Do all systems train alike, and which few numbers say how long their steps took?"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import median
from typing import Any

NOISE = 0.005
"""Largest relative distance of a loss from the other systems' that bf16 may explain. (Bf16 parameters and
fp32 ones under autocast, A1's model in one process, 50 steps: 0.0008. Two bf16 sums: 0.0001.)"""

NORM_NOISE = 0.05
"""The same for the norm of the gradient before clipping (measured likewise: 0.004 and 0.0005). It shows
what losses hide: where every step is clipped, a sum trains exactly as a mean does."""

Row = dict[str, Any]
"""A line of a table: its name, and what was measured."""


def statistics(values: Sequence[float]) -> dict[str, float]:
    """What is kept of measured numbers, four digits of each."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def judge(rows: list[Row]) -> None:
    """How far is each line from the median over libraries, one curve each?

    No library outvotes the others. Lines with another number of ranks have other data: they are
    compared among themselves.
    """
    for ranks in {row["ranks"] for row in rows}:
        trained = [r for r in rows if r.get("compared") and r["ranks"] == ranks]
        _hold_against_median(trained, "losses", "loss_distance")
        _hold_against_median([row for row in trained if "norms" in row], "norms", "norm_distance")
        for row in trained:
            row["comparable"] = (
                row["loss_distance"] <= NOISE and row.get("norm_distance", 0.0) <= NORM_NOISE
            )


def _hold_against_median(rows: Sequence[Row], curve: str, result: str) -> None:
    curves = {row["family"].split()[0]: row[curve] for row in reversed(rows)}
    centre = [_middle(column) for column in zip(*curves.values(), strict=True)]
    for row in rows:
        row[result] = distance(row[curve], centre)


def _middle(values: Sequence[float]) -> float:
    """The median of those that are numbers."""
    return median([value for value in values if isfinite(value)] or [inf])


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative distance, step by step; infinite where a step has no number."""
    pairs = list(zip(found, wanted, strict=True))
    if not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return inf
    return max((abs(a - b) / abs(b) if b else inf for a, b in pairs if a != b), default=0.0)


def usable(row: Row) -> bool:
    """Was it measured, and does it train as the others do?"""
    return "cpu_ms" in row and row.get("comparable", True)
