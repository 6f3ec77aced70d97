"""Measures how long each rank itself takes for a step, and reports stragglers on the first rank.

The first rank announces a window of steps to come in the store. While a window runs, the main thread
notes the time, and the sum of its waits, at the end of each step. Afterwards each watchdog posts the
result in its thread; the first rank compares. No collective is added, and no rank waits.

On a device whose queue takes collectives (NCCL) waits do not block the host, and no rank is reported.
"""

from __future__ import annotations

import json
import math
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from zeroshard.comm.recorder import Recorder
from zeroshard.comm.store_keys import Store
from zeroshard.watchdog.messages import StoreLost

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


REPORT_EVERY_S = 600.0
_AHEAD_TICKS = 6
"""A window begins so many ticks after its announcement: all ranks have read it by then."""
_LOOK_EVERY = 3
"""Looks of the watchdog for each read of the announcement."""
_GIVE_UP_TICKS = 40
"""The first rank waits so long for the results of the others."""
_STORE_S = 2.0

Incident = tuple[float, str, list[Straggler]]
"""When (seconds since 1970), the line that was printed, and the stragglers, the worst first."""


def shares_of(marks: Sequence[tuple[float, float]]) -> list[StepShare]:
    """The mean own time and wait of each part of a window, from the marks of its steps."""
    steps = len(marks) - 1
    parts = min(PARTS, steps)
    at = [part * steps // parts for part in range(parts + 1)]
    found = []
    for begin, end in pairwise(at):
        (began_s, before_s), (ended_s, after_s) = marks[begin], marks[end]
        waited_s, count = after_s - before_s, end - begin
        found.append(StepShare((ended_s - began_s - waited_s) / count, waited_s / count))
    return found


class StepMarks:
    """When each step of a window ended, and how long the host had been blocked in waits until then.

    Another thread sets the window. ``recorders``: the sequences whose waits count. Costs 0.1 us per step
    outside of a window, and about 2 us inside.
    """

    def __init__(self, recorders: Sequence[Recorder]) -> None:
        self._recorders = tuple(recorders)
        self._first, self._last = 0, -1
        self._marks: list[tuple[float, float]] = []

    def arm(self, first: int, steps: int) -> None:
        """Mark the ends of ``steps`` steps and of step ``first`` before them."""
        self._last = -1  # nothing is marked between these lines
        self._marks = []
        self._first = first
        self._last = first + steps

    def add(self, step: int, now_s: float) -> None:
        """Step ``step`` has ended at ``now_s``. Called by the thread that calls collectives."""
        if self._first <= step <= self._last:
            self._marks.append((now_s, sum(each.blocked_s for each in self._recorders)))

    def whole(self) -> list[tuple[float, float]] | None:
        """The marks; None before the end of the window, or if a step was marked twice or not at all."""
        marks, steps = self._marks, self._last - self._first
        return marks if steps > 0 and len(marks) == steps + 1 else None


class Pace:
    """The windows of one session. :meth:`look` runs at each look of the watchdog, in its thread.

    ``call``: an operation of the watchdog's store client. ``groups``: ranks whose work can be compared.
    ``listeners`` are called on the first rank, in the watchdog's thread, when a line has been printed.
    """

    def __init__(
        self,
        call: Callable[[Callable[[Store], Any], float], Any],
        recorder: Recorder,
        marks: StepMarks,
        *,
        label: str,
        ranks: Sequence[int],
        groups: Sequence[Sequence[int]],
        host: Callable[[int], str],
        ratio: float,
        window: int,
        tick_s: float,
    ) -> None:
        self._call = call
        self._recorder, self._marks = recorder, marks
        self._key, self._ranks, self._groups = f"pace/{label}", tuple(ranks), groups
        self._host, self._ratio, self._window, self._tick_s = host, ratio, window, tick_s
        self._first = 0  # of the window that is measured; 0: none
        self._posted = True
        self._looks = 0
        self._give_up_s = math.inf
        self._silent_until_s = 0.0
        self.listeners: list[Callable[[Incident], None]] = []

    def look(self) -> None:
        """Do what is due. Quiet if the store does not answer: that is the watchdog's to report."""
        try:
            if self._recorder.rank == self._ranks[0]:
                self._lead()
            else:
                self._follow()
        except StoreLost:
            return

    def _follow(self) -> None:
        self._looks += 1
        if not self._looks % _LOOK_EVERY:
            first = self._call(lambda store: store.add(self._key, 0), _STORE_S)
            if first != self._first:
                self._arm(first)
        self._post()

    def _lead(self) -> None:
        now_s = time.monotonic()
        if self._posted:
            step_s = self._recorder.median_step_s()
            if step_s <= 0 or now_s < self._silent_until_s:
                return
            ahead = 2 + math.ceil(_AHEAD_TICKS * self._tick_s / step_s)
            first = self._recorder.step + ahead
            before = self._first
            self._call(lambda store: store.add(self._key, first - before), _STORE_S)
            self._arm(first)
            self._give_up_s = math.inf
            return
        own = self._shares()
        if own is None:
            self._posted = self._recorder.step > self._first + 2 * self._window  # it is not whole
            return
        self._give_up_s = min(self._give_up_s, now_s + _GIVE_UP_TICKS * self._tick_s)
        samples = self._samples(own)
        self._posted = samples is not None or now_s > self._give_up_s
        if samples is not None:
            self._judge(samples, now_s)

    def _arm(self, first: int) -> None:
        self._first, self._posted = first, False
        self._marks.arm(first, self._window)
        self._recorder.on_step = self._marks.add

    def _shares(self) -> list[StepShare] | None:
        """What this rank measured; None before the end of the window."""
        marks = self._marks.whole()
        return None if marks is None else shares_of(marks)

    def _post(self) -> None:
        shares = None if self._posted else self._shares()
        if shares is not None:
            text = json.dumps([self._first, shares])
            key = f"{self._key}/{self._recorder.rank}"
            self._call(lambda store: store.set(key, text), _STORE_S)
            self._posted = True

    def _samples(self, own: list[StepShare]) -> dict[int, list[StepShare]] | None:
        """What all ranks measured in this window; None: some have not posted it yet."""
        others = self._ranks[1:]
        keys = [f"{self._key}/{rank}" for rank in others]

        def read(store: Store) -> list[str] | None:
            if not store.check(keys):
                return None
            return [text.decode() for text in store.multi_get(keys)]

        texts = self._call(read, _STORE_S)
        if texts is None:
            return None
        samples = {self._ranks[0]: own}
        for rank, text in zip(others, texts, strict=True):
            first, shares = json.loads(text)
            if first != self._first or len(shares) != len(own):
                return None
            samples[rank] = [StepShare(*share) for share in shares]
        return samples

    def _judge(self, samples: Mapping[int, Sequence[StepShare]], now_s: float) -> None:
        found = [
            straggler
            for group in self._groups
            for straggler in find_stragglers({rank: samples[rank] for rank in group}, self._ratio)
        ]
        if not found:
            return
        found.sort(key=lambda straggler: -straggler.waited_s)
        text = straggler_text(found, self._host, self._window)
        self._silent_until_s = now_s + REPORT_EVERY_S
        print(f"zeroshard: {text}", file=sys.stderr, flush=True)
        for listener in self.listeners:
            listener((time.time(), text, found))
