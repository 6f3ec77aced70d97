"""Where all ranks stop after a signal to one of them: the same place in the program, between two steps.

[Note: agreement to stop]
A rank passes *points*: the end of a step, a forward of an evaluation, the first forward of training after
a step. Between points it may wait in collectives for other ranks, so it can stop only at a point, and all
ranks have to stop after the same step.

The watchdog's thread of each rank posts the last point that its rank has passed. The first rank's thread
takes the last one of all. Each rank stops at its first point after that one. Two facts make this right:

* A rank that has posted waits at its next point until the common one is known. So none runs past it.
* Nothing is posted by a main thread. So a rank that waits in a collective posts too, and the others go on
  until it can pass the common point.

Points are compared as ``(steps, number)``: the number is 0 at the end of a step, counts forwards of an
evaluation after it, and is infinite at the first forward of training. Ranks may evaluate different
numbers of batches: who has no more of them stops before its next step.

Keys in the store, below ``stop/LABEL``: ``asks``, ``asked`` (the signal in words), ``at/RANK``, ``came``
(how many ranks have posted their point), ``stop``. Who asks rings the watchdogs' bell.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zeroshard.comm.store_keys import Store, look
from zeroshard.watchdog.inquiry import POLL_S
from zeroshard.watchdog.messages import BELL
from zeroshard.watchdog.stop_signals import StopSignals

Point = tuple[float, float]

_LOOK_S = 1.0  # longest time that one look of the watchdog waits for the other ranks
AGREE_S = 30.0  # longest time that a main thread waits for them


class StopAgreement:
    """The agreement of the ranks of one engine. ``asked``: the signal that began it in words, or "".

    ``call(operation)`` runs an operation on the store; None: there is one rank. ``check()`` raises a
    fatal diagnosis. ``ranks``: the global ranks, of which this process is ``rank``. ``rung()``: the
    number of the watchdogs' bell; the store is asked for a signal only when it changes.
    """

    def __init__(
        self,
        signals: StopSignals,
        *,
        rank: int = 0,
        ranks: Sequence[int] = (0,),
        label: str = "",
        call: Callable[[Callable[[Store], Any]], Any] | None = None,
        check: Callable[[], None] = lambda: None,
        rung: Callable[[], int] | None = None,
    ) -> None:
        self._rung, self._heard = rung, -1
        self.asked = ""
        self.stop: Point | None = None
        self._signals = signals
        self._rank, self._ranks = rank, tuple(ranks)
        self._key = f"stop/{label}"
        self._call, self._check = call, check
        self._passed: Point = (0, 0)
        self._announced = self._posted = self._sent = False

    # ---------------------------------------------------------------- the main thread

    def stops_at(self, point: Point) -> bool:
        """Note that this rank has come to ``point``. Whether it is the one at which all ranks stop.

        Costs two reads of attributes until a signal comes. Waits for the other ranks then, for at most
        :data:`AGREE_S` seconds. If they do not answer, the signal acts as without an agreement.
        """
        if self._call is None:
            if self._signals.seen:
                self.asked, self.stop = self._words(self._signals.seen), self._passed
            return bool(self._signals.seen)
        self._passed = point  # before the question below, see the note
        if not self._posted:
            return False
        until = time.monotonic() + AGREE_S
        while self.stop is None:
            self._check()
            if time.monotonic() > until:
                self._signals.give_up()
            time.sleep(POLL_S)
        return point > self.stop

    # ---------------------------------------------------------------- the watchdog's thread

    def look(self) -> None:
        """Read signals, and agree with the other ranks if one of them got one."""
        seen = self._signals.poll()
        if self._call is None or self.stop is not None:
            return
        if seen and not self._announced:
            self._call(partial(_announce, key=self._key, words=self._words(seen)))
            self._announced = True
        if not self.asked:
            rung = self._heard + 1 if self._rung is None else self._rung()
            if rung != self._heard or self._announced:
                self.asked = self._call(partial(look, key=f"{self._key}/asked")) or ""
                self._heard = rung
        if not self.asked:
            return
        until = time.monotonic() + _LOOK_S
        while not self._agreed() and time.monotonic() < until:
            time.sleep(max(POLL_S, len(self._ranks) / 4096))

    def _agreed(self) -> bool:
        assert self._call is not None
        self._posted = True  # before the point is read, see the note
        if not self._sent:
            at = partial(_post, key=self._key, rank=self._rank, value=self._passed)
            self._call(at)
            self._sent = True
        if self._rank != self._ranks[0]:
            self.stop = self._read("stop")
            return self.stop is not None
        points = self._call(partial(_points, key=self._key, ranks=self._ranks))
        if not points:
            return False
        stop = max(points)
        self._call(partial(_write, key=f"{self._key}/stop", value=stop))
        self.stop = stop
        return True

    def _read(self, name: str) -> Point | None:
        assert self._call is not None
        text = self._call(partial(look, key=f"{self._key}/{name}"))
        if text is None:
            return None
        steps, number = json.loads(text)
        return steps, number

    def _words(self, seen: str) -> str:
        return f"{seen} to rank {self._rank}"


def _announce(store: Store, *, key: str, words: str) -> None:
    if store.add(f"{key}/asks", 1) == 1:
        store.set(f"{key}/asked", words)
        store.add(BELL, 1)


def _post(store: Store, *, key: str, rank: int, value: Point) -> None:
    _write(store, key=f"{key}/at/{rank}", value=value)
    store.add(f"{key}/came", 1)


def _points(store: Store, *, key: str, ranks: Sequence[int]) -> list[Point]:
    """The points of all ranks; empty if one is missing."""
    if store.add(f"{key}/came", 0) < len(ranks):
        return []
    found = store.multi_get([f"{key}/at/{rank}" for rank in ranks])
    return [(steps, number) for steps, number in map(json.loads, found)]


def _write(store: Store, *, key: str, value: Point) -> None:
    store.set(key, json.dumps(value))
