"""Marks the lines whose losses or gradient norms differ too much from those of the other libraries.

Also reduces measured times to their median, minimum and maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from statistics import median
from typing import Any

LOSS_TOLERANCE = 0.005
"""The largest relative distance of a loss from those of the other systems that rounding to bf16 may
explain. Measured with A1's model in one process over 50 steps: bf16 parameters and fp32 parameters under
autocast differ by 0.0008, two orders of bf16 sums by 0.0001."""

NORM_TOLERANCE = 0.05
"""The same for the norm of the gradient before clipping. Measured in the same way: 0.004 and 0.0005.
Norms show an error that losses do not show: if every step is clipped, the sum of gradients trains exactly
like their mean."""

Row = dict[str, Any]
"""A line of a table: its name and its measurements."""


def statistics(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum, rounded to four significant digits."""
    found = {"median": median(values), "min": min(values), "max": max(values)}
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def mark_comparable(rows: list[Row]) -> None:
    """Compute the distance of each line from the median over libraries, and set ``comparable``.

    Each library has one curve in the median, so that a library with many lines does not outvote the
    others. Lines with another number of ranks have other data. They are compared among themselves.
    """
    for ranks in {row["ranks"] for row in rows}:
        trained = [r for r in rows if r.get("compared") and r["ranks"] == ranks]
        _compare_with_median(trained, "losses", "loss_distance")
        _compare_with_median([row for row in trained if "norms" in row], "norms", "norm_distance")
        for row in trained:
            row["comparable"] = (
                row["loss_distance"] <= LOSS_TOLERANCE
                and row.get("norm_distance", 0.0) <= NORM_TOLERANCE
            )


def _compare_with_median(rows: Sequence[Row], curve: str, result: str) -> None:
    curves = {row["family"].split()[0]: row[curve] for row in reversed(rows)}
    centre = [_middle(column) for column in zip(*curves.values(), strict=True)]
    for row in rows:
        row[result] = distance(row[curve], centre)


def _middle(values: Sequence[float]) -> float:
    """The median of the finite values; infinite if there is none."""
    return median([value for value in values if isfinite(value)] or [inf])


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative distance of any step; infinite if a value of any step is not finite."""
    pairs = list(zip(found, wanted, strict=True))
    if not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return inf
    return max((abs(a - b) / abs(b) if b else inf for a, b in pairs if a != b), default=0.0)


def usable(row: Row) -> bool:
    """Whether the line was measured and trains as the others do."""
    return "cpu_ms" in row and row.get("comparable", True)
