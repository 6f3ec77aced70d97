"""Rows that are not as expected, and what is seen instead. A row here that is right fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    seen: str  # a regular expression
    stages: tuple[int, ...] = (0, 1, 2, 3)
    ranks: tuple[int, ...] = (1, 2)


NOT_YET: dict[str, Fault] = {}
