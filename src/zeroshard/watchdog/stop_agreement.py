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

import contextlib
import json
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

from zeroshard.comm.store_keys import Store, look
from zeroshard.errors import UsageError
from zeroshard.watchdog.inquiry import POLL_S
from zeroshard.watchdog.messages import BELL

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AGAIN_S = 1.0
"""A launcher and a terminal may both send one signal. The same signal later than this is a second one."""


class StopSignals:
    """The first of :data:`SIGNALS` that this process got. The second one ends the process, as before.

    One object per process at a time, made in the main thread. Signals that are ignored stay ignored. An
    earlier wakeup descriptor still gets its bytes. Forked processes, such as workers of data loaders, get
    the handlers of before.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "the engine is to save after a signal (preemption), but it is built in another thread "
                "than the main one, and only that one can handle signals. Build it in the main thread."
            )
        if _active:
            raise UsageError(
                "another engine of this process saves after a signal (preemption), and both would end "
                "the process. Set it for one engine, and save the other one in its client_state or by "
                "engine.preempted."
            )
        self.seen = ""
        self._handled: dict[int, float] = {}
        self._received, self._written = socket.socketpair()
        for end in (self._received, self._written):
            end.setblocking(False)
        handler = partial(_handle, weakref.ref(self))
        self._before: dict[int, Any] = {}
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)
        self._descriptor_before = signal.set_wakeup_fd(
            self._written.fileno(), warn_on_full_buffer=False
        )
        _active.add(self)

    def poll(self) -> str:
        """The name of the first signal, or "". For another thread, also while the main one waits."""
        with contextlib.suppress(BlockingIOError, OSError):
            while numbers := self._received.recv(256):
                if self._descriptor_before >= 0:
                    with contextlib.suppress(OSError):
                        os.write(self._descriptor_before, numbers)
                for number in numbers:
                    if number in self._before:
                        self._note(number)
        return self.seen

    def _note(self, number: int) -> None:
        self.seen = self.seen or signal.Signals(number).name

    def handle(self, number: int) -> None:
        """Note a signal; the same one a second time ends the process as before."""
        self._note(number)
        now_s = time.monotonic()
        if now_s - self._handled.setdefault(number, now_s) >= _AGAIN_S:
            self._act(number)

    def give_up(self) -> None:
        """Let the first signal act as it would have without this object. In the main thread."""
        self._act(signal.Signals[self.seen or "SIGTERM"])

    def _act(self, number: int) -> None:
        self.close()
        os.kill(os.getpid(), number)

    def close(self) -> None:
        """Restore the handlers of before. Only the main thread can; else the next signal does."""
        if self not in _active:
            return
        _active.discard(self)
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._descriptor_before, warn_on_full_buffer=False)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._received.close()
        self._written.close()


_active: weakref.WeakSet[StopSignals] = weakref.WeakSet()


def _handle(signals: weakref.ref[StopSignals], number: int, _frame: FrameType | None) -> None:
    """The handler. If the object is gone without ``close()``, the signal acts as by default."""
    if (strong := signals()) is not None:
        strong.handle(number)
        return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _in_child() -> None:
    """A forked process must not write into its parent's socket: its end is no signal to the parent."""
    for signals in list(_active):
        signals.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


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
            self._call(lambda store: self._announce(store, seen))
            self._announced = True
        if not self.asked:
            rung = self._heard + 1 if self._rung is None else self._rung()
            if rung != self._heard or self._announced:
                self.asked = self._call(lambda store: look(store, f"{self._key}/asked")) or ""
                self._heard = rung
        if not self.asked:
            return
        until = time.monotonic() + _LOOK_S
        while not self._agreed(self._call) and time.monotonic() < until:
            time.sleep(max(POLL_S, len(self._ranks) / 4096))

    def _announce(self, store: Store, seen: str) -> None:
        if store.add(f"{self._key}/asks", 1) == 1:
            store.set(f"{self._key}/asked", self._words(seen))
            store.add(BELL, 1)

    def _agreed(self, call: Callable[[Callable[[Store], Any]], Any]) -> bool:
        self._posted = True  # before the point is read, see the note
        if not self._sent:
            passed = json.dumps(self._passed)
            call(lambda store: self._post(store, passed))
            self._sent = True
        if self._rank != self._ranks[0]:
            text = call(lambda store: look(store, f"{self._key}/stop"))
            self.stop = None if text is None else _point(text)
            return self.stop is not None
        if not (points := call(self._points)):
            return False
        stop = max(points)
        call(lambda store: store.set(f"{self._key}/stop", json.dumps(stop)))
        self.stop = stop
        return True

    def _post(self, store: Store, passed: str) -> None:
        store.set(f"{self._key}/at/{self._rank}", passed)
        store.add(f"{self._key}/came", 1)

    def _points(self, store: Store) -> list[Point]:
        """The points of all ranks; empty if one is missing."""
        if store.add(f"{self._key}/came", 0) < len(self._ranks):
            return []
        found = store.multi_get([f"{self._key}/at/{rank}" for rank in self._ranks])
        return list(map(_point, found))

    def _words(self, seen: str) -> str:
        return f"{seen} to rank {self._rank}"


def _point(text: str | bytes) -> Point:
    steps, number = json.loads(text)
    return steps, number
