"""Vector clocks: which operation is certain to run before which other.

A *timeline* is a sequence of operations that run one after the other: a stream, or a host thread. Its
clock says how many operations of every other timeline are certain to have ended when its next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping

Clock = dict[int, int]
"""By number of a timeline: how many of its operations have ended."""


def merge(into: Clock, other: Mapping[int, int]) -> None:
    """Let ``into`` know all that ``other`` knows.

    >>> clock = {0: 3, 1: 1}
    >>> merge(clock, {1: 2, 2: 5})
    >>> clock
    {0: 3, 1: 2, 2: 5}
    """
    for number, tick in other.items():
        if into.get(number, 0) < tick:
            into[number] = tick


class Timeline:
    """A stream or a host thread. ``number`` is its key in clocks."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.clock: Clock = {}

    def __repr__(self) -> str:
        return self.name

    @property
    def ticks(self) -> int:
        """The number of its operations so far."""
        return self.clock.get(self.number, 0)

    def tick(self) -> int:
        """Begin an operation. Returns its number, which is counted from 1."""
        now = self.clock.get(self.number, 0) + 1
        self.clock[self.number] = now
        return now

    def join(self, clock: Mapping[int, int]) -> None:
        """Let later operations begin after all that ``clock`` knows."""
        merge(self.clock, clock)
