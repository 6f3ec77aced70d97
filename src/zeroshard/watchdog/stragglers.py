"""Which ranks are slower than the others, from how long each rank itself takes for a step. Pure.

A rank's *own time* of a step is the time in which the host did not wait for other ranks. A *straggler* is
a rank whose own time exceeds that of the others, and for which they wait about as much longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

PARTS = 5
"""The steps of a window are compared in so many parts. A straggler is slow in each: where data is uneven,
another rank is slow in every part."""
_SEEN_BY_OTHERS = 0.5
"""The part of the excess that the others' waits must show."""
_COSTS = 0.05
"""The part of a step that the others must wait for it. Less is not worth a line."""
_LEAST_S = 0.001


class StepShare(NamedTuple):
    """Mean seconds per step over some steps: the rank's own time, and its waits for other ranks."""

    own_s: float
    wait_s: float


class Straggler(NamedTuple):
    """A rank that is slow. Times are means over the window, in seconds per step.

    ``median_s``: own time of the others. ``waited_s``: how long they wait for it.
    """

    rank: int
    own_s: float
    median_s: float
    waited_s: float

    @property
    def slower(self) -> float:
        """By what part it is slower: 0.23 is 23 %."""
        return self.own_s / self.median_s - 1


def find_stragglers(samples: Mapping[int, Sequence[StepShare]], ratio: float) -> list[Straggler]:
    """The ranks whose own time is more than ``ratio`` times the median of the others, the worst first.

    ``samples``: the shares of each rank, one for each part of the window; the same number for all. The
    ranks do the same work, so that their times can be compared. Time: O(ranks log ranks).

    >>> fast, slow = StepShare(0.10, 0.05), StepShare(0.15, 0.0)
    >>> [found.rank for found in find_stragglers({0: [fast], 1: [slow], 2: [fast]}, 1.2)]
    [1]
    """
    if len(samples) < 2:
        return []
    candidates = set(samples)
    for part in zip(*samples.values(), strict=True):
        ordered = sorted(share.own_s for share in part)
        for rank, share in zip(samples, part, strict=True):
            if share.own_s <= ratio * _median_of_others(ordered, share.own_s):
                candidates.discard(rank)
    if not candidates:
        return []
    means = {
        rank: StepShare(fmean(s.own_s for s in parts), fmean(s.wait_s for s in parts))
        for rank, parts in samples.items()
    }
    owns = sorted(mean.own_s for mean in means.values())
    waits = sorted(mean.wait_s for mean in means.values())
    found = []
    for rank in candidates:
        own_s, wait_s = means[rank]
        median_s = _median_of_others(owns, own_s)
        waited_s = _median_of_others(waits, wait_s) - wait_s
        enough_s = max(_SEEN_BY_OTHERS * (own_s - median_s), _COSTS * (own_s + wait_s), _LEAST_S)
        if median_s > 0 and waited_s >= enough_s:
            found.append(Straggler(rank, own_s, median_s, waited_s))
    return sorted(found, key=lambda straggler: (-straggler.own_s, straggler.rank))


def straggler_text(found: Sequence[Straggler], host: Callable[[int], str], steps: int) -> str:
    """One line about the worst of ``found``, and the numbers of the others."""
    worst = found[0]
    where = f" (host {host(worst.rank)})" if host(worst.rank) else ""
    text = (
        f"rank {worst.rank}{where} is {100 * worst.slower:.0f} % slower than the median over "
        f"{steps} steps: own time {_ms(worst.own_s)}, median {_ms(worst.median_s)}; the others wait "
        f"{_ms(worst.waited_s)} for it"
    )
    if len(found) > 1:
        also = ", ".join(f"{each.rank} ({100 * each.slower:.0f} %)" for each in found[1:4])
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        text += f"; also slow: {also}{more}"
    return text


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """The median of ``ordered`` without one value equal to ``own``, which is in it."""
    at, count = bisect_left(ordered, own), len(ordered) - 1
    low, high = (ordered[k if k < at else k + 1] for k in ((count - 1) // 2, count // 2))
    return (low + high) / 2


def _ms(seconds: float) -> str:
    ms = 1000 * seconds
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"
