"""Sends the events of a run to its sinks, without ever holding up training.

Each sink has a thread and a queue of its own. A sink that is slow loses its oldest events, which are
counted. One that raises, or is in one call for more than :data:`BLOCKED_S`, is switched off with one
line in the log. Training and the other sinks go on. Only rank 0 should build sinks.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.metrics.sinks import SINKS, CallableSink, Event, Sink, check_packages

_log = logging.getLogger("zeroshard")

QUEUE = 1000
"""Lists of events that wait for one sink; one list is one step."""
LINGER_S = 0.2
"""The thread of a sink wakes no more often than this."""
BLOCKED_S = 20.0
"""A sink is switched off if one call takes longer."""
OPEN_S = 120.0
"""The same for opening it, which may connect to a server."""
CLOSE_S = 60.0
"""So long the end of a run waits for a sink that makes progress."""


class Worker:
    """Calls one sink in a thread, in the order of :meth:`put`. No method raises.

    ``before_exit()`` is called when the process ends and :meth:`close` was not called.
    """

    def __init__(
        self, sink: Any, name: str = "", before_exit: Callable[[], None] | None = None
    ) -> None:
        self.sink = sink
        self.name = name or getattr(sink, "__name__", type(sink).__name__)
        self.dropped = 0
        self.is_off = False
        self._queue: deque[Any] = deque()
        self._changed = threading.Condition()
        self._call: tuple[str, float, float] | None = None  # what runs, since when, and its limit
        self._is_closing = False
        self._is_idle = False  # the thread waits for an item
        self._is_hurried = False  # somebody waits for the thread
        self._thread: threading.Thread | None = None
        self._at_exit = partial(_close, self, before_exit)  # atexit finds it by identity

    def put(self, item: Any) -> None:
        """Queue an argument of ``sink.write``. Costs a lock and, at the first time, a thread."""
        if self.is_off or self._is_closing or self._is_blocked():
            return
        if self._thread is None:
            self._begin()
        with self._changed:
            if len(self._queue) >= QUEUE:
                self._queue.popleft()
                self.dropped += 1
                if self.dropped == 1:
                    _log.warning(
                        "%s is slower than the run: its oldest events are dropped", self.name
                    )
            self._queue.append(item)
            if self._is_idle:
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is written, but no longer than ``timeout_s``."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.is_off or not (self._queue or self._call), timeout=timeout_s
            )
            self._is_hurried = False

    def close(self) -> None:
        """Write what is queued, then close the sink. Waits while it makes progress, at most a minute."""
        if self._is_closing:
            return
        self.end()
        atexit.unregister(self._at_exit)
        thread, until_s = self._thread, time.monotonic() + CLOSE_S
        while thread is not None and thread.is_alive() and not self._is_blocked():
            if time.monotonic() > until_s:
                self._switch_off(f"needs more than {CLOSE_S:.0f} s to end")
                break
            thread.join(0.02)
        with self._changed:  # the thread may be about to say why it is off
            if self.dropped and not self.is_off:
                _log.warning("%s lost %d lists of events", self.name, self.dropped)

    def end(self) -> None:
        """Write what is queued, then close the sink, without waiting for it."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _begin(self) -> None:
        try:
            if isinstance(self.sink, Sink):
                self.sink.find_run()
        except Exception as error:
            self._fail("open", error)
            return
        self._thread = threading.Thread(
            target=self._work, name=f"zeroshard-{self.name}", daemon=True
        )
        self._thread.start()

    def _work(self) -> None:
        if not self._try("open", OPEN_S, getattr(self.sink, "open", lambda: None)):
            return
        atexit.register(self._at_exit)  # later than the tracker's own hook, so it runs before that
        while batch := self._take():
            for item in batch:
                if not self._try("write", BLOCKED_S, self.sink.write, item):
                    return
        self._try("close", CLOSE_S, self.sink.close)

    def _take(self) -> list[Any]:
        """All that is queued; empty at the end. A thread that woke for every step would slow the run."""
        with self._changed:
            self._call = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_closing or self._is_hurried, timeout=LINGER_S)
            self._is_idle = True
            self._changed.wait_for(lambda: self._queue or self._is_closing)
            self._is_idle = False
            batch = list(self._queue)
            self._queue.clear()
            self._call = ("write", time.monotonic(), BLOCKED_S) if batch else None
        return batch

    def _try(self, what: str, limit_s: float, call: Callable[..., object], *args: Any) -> bool:
        self._call = (what, time.monotonic(), limit_s)
        try:
            call(*args)
        except Exception as error:
            self._fail(what, error)
        return not self.is_off

    def _is_blocked(self) -> bool:
        """Whether the sink is off because a call takes too long."""
        call = self._call
        if call is not None and not self.is_off:
            what, since_s, limit_s = call
            if time.monotonic() > since_s + limit_s:
                self._switch_off(f"could not {what} within {limit_s:.0f} s")
        return self.is_off

    def _fail(self, what: str, error: Exception) -> None:
        self._switch_off(f"could not {what}", f" ({type(error).__name__}: {error})")

    def _switch_off(self, reason: str, error: str = "") -> None:
        with self._changed:
            if self.is_off:
                return
            self.is_off = True
            self._queue.clear()
            self._call = None
            _log.warning(
                "%s %s and is switched off; training continues%s", self.name, reason, error
            )
            self._changed.notify_all()


class Monitors:
    """All sinks of a run. Its methods never raise. ``bool()`` is false without sinks."""

    def __init__(self, sinks: Sequence[Any] = ()) -> None:
        self._workers = [Worker(sink) for sink in sinks]
        # An engine that is dropped without close() must not leave threads that wait.
        weakref.finalize(self, _end_all, self._workers).atexit = False

    def __bool__(self) -> bool:
        return any(not worker.is_off for worker in self._workers)

    def add(self, sink: Sink | Callable[[Sequence[Event]], object]) -> None:
        """Send events to ``sink`` as well: an object like :class:`Sink`, or a function of the events."""
        has_methods = hasattr(sink, "write")
        self._workers.append(Worker(sink if has_methods else CallableSink(sink)))  # type: ignore[arg-type]

    def write(self, events: Sequence[Event]) -> None:
        """Queue the events of one step."""
        if events:
            for worker in self._workers:
                worker.put(events)

    def flush(self, timeout_s: float = 1.0) -> None:
        """Wait until the events are written, at most ``timeout_s`` for each sink."""
        for worker in self._workers:
            worker.flush(timeout_s)

    def close(self) -> None:
        """Write what is queued, and close all sinks."""
        for worker in self._workers:
            worker.close()
        self._workers.clear()


def build_monitors(config: Any) -> Monitors:
    """A sink for every monitor section of ``config`` that is enabled.

    Raises:
        ConfigError: packages are missing, or folders cannot be written. The text names all of them.
    """
    check_packages(config)
    sinks: list[Any] = []
    problems: list[str] = []
    for key, sink in SINKS.items():
        section = getattr(config, key)
        if section.enabled:
            try:
                sinks.append(sink(section))
            except ConfigError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return Monitors(sinks)


def _close(worker: Worker, before: Callable[[], None] | None) -> None:
    if before is not None:
        before()
    worker.close()


def _end_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()
