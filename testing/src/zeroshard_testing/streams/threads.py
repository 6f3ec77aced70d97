"""Follows host threads: which began or ended before which other, and what passed between them.

[Note: locks] A lock keeps two threads from using memory at the same time. It does not say which comes
first: that may differ from run to run. So what is done under one lock never conflicts with what is done
under the same lock, and is not ordered with it either. Otherwise one run would not cover all timings.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from zeroshard_testing.streams.clocks import Clock, merge
from zeroshard_testing.streams.machine import HostThread, Machine
from zeroshard_testing.streams.operators import OperatorMode
from zeroshard_testing.streams.patches import Patches
from zeroshard_testing.streams.tensors import Storages

_CLOCK = "_pretended_clock"


def _give(machine: Machine, shared: Any) -> None:
    """Let whoever takes from ``shared`` know what this thread knows."""
    with machine.lock:
        clock: Clock = shared.__dict__.setdefault(_CLOCK, {})
        thread = machine.thread()
        thread.tick()
        merge(clock, thread.clock)


def _take(machine: Machine, shared: Any) -> None:
    with machine.lock:
        machine.thread().join(shared.__dict__.get(_CLOCK, {}))


def install(storages: Storages, patches: Patches) -> None:
    """Follow threads that start from now on, executors, events and queues."""
    machine = storages.machine
    _threads(storages, patches)
    _futures(machine, patches)
    _locks(machine, patches)

    def giving(old: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            _give(machine, self)
            return old(self, *args, **kwargs)

        return call

    def taking(old: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = old(self, *args, **kwargs)
            _take(machine, self)
            return result

        return call

    event = threading.Event
    patches.set(event, "set", giving(event.set))
    patches.set(event, "wait", taking(event.wait))
    patches.set(event, "is_set", taking(event.is_set))
    patches.set(queue.Queue, "put", giving(queue.Queue.put))
    patches.set(queue.Queue, "get", taking(queue.Queue.get))

    class SimpleQueue(queue.SimpleQueue):  # type: ignore[type-arg]
        """A queue that passes on, with each item, what the thread knew that put it there."""

        def put(self, item: Any, *args: Any, **kwargs: Any) -> None:
            with machine.lock:
                thread = machine.thread()
                thread.tick()
                known = dict(thread.clock)
            super().put((known, item), *args, **kwargs)

        def get(self, *args: Any, **kwargs: Any) -> Any:
            known, item = super().get(*args, **kwargs)
            with machine.lock:
                machine.thread().join(known)
            return item

        put_nowait = put

        def get_nowait(self) -> Any:
            return self.get(block=False)

    patches.everywhere(queue, "SimpleQueue", SimpleQueue)


def _threads(storages: Storages, patches: Patches) -> None:
    machine, thread = storages.machine, threading.Thread
    old_start, old_run, old_join = thread.start, thread._bootstrap_inner, thread.join  # type: ignore[attr-defined]

    def start(self: Any) -> None:
        with machine.lock:
            self._pretended_start = dict(machine.thread().clock)
        old_start(self)

    def run(self: Any) -> None:
        begun: Clock | None = self.__dict__.get("_pretended_start")
        if begun is None:
            old_run(self)
            return
        timeline = machine.name_thread(self.name)
        timeline.join(begun)
        try:
            with OperatorMode(storages):
                old_run(self)
        finally:
            self._pretended_end = timeline.clock

    def join(self: Any, timeout: float | None = None) -> None:
        old_join(self, timeout)
        end: Clock | None = self.__dict__.get("_pretended_end")
        if end is not None and not self.is_alive():
            with machine.lock:
                machine.thread().join(end)

    patches.set(thread, "start", start)
    patches.set(thread, "_bootstrap_inner", run)
    patches.set(thread, "join", join)


def _futures(machine: Machine, patches: Patches) -> None:
    old_submit = ThreadPoolExecutor.submit

    def submit(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        with machine.lock:
            before = dict(machine.thread().clock)
        after: Clock = {}

        def run() -> Any:
            with machine.lock:
                machine.thread().join(before)
            try:
                return function(*args, **kwargs)
            finally:
                with machine.lock:
                    thread = machine.thread()
                    thread.tick()
                    merge(after, thread.clock)

        future = old_submit(self, run)
        future._pretended_after = after  # type: ignore[attr-defined]
        return future

    def resolved(old: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, timeout: float | None = None) -> Any:
            try:
                return old(self, timeout)
            finally:
                if self.done():
                    with machine.lock:
                        machine.thread().join(self.__dict__.get("_pretended_after", {}))

        return call

    patches.set(ThreadPoolExecutor, "submit", submit)
    patches.set(Future, "result", resolved(Future.result))
    patches.set(Future, "exception", resolved(Future.exception))


class _Lock:
    """A lock whose holder is known. See [Note: locks]. Subclasses have the machine and the real lock."""

    machine: Machine
    make: Callable[[], Any]
    numbers = itertools.count()

    def __init__(self) -> None:
        self._real = self.make()
        self._number = next(self.numbers)
        self._holder: HostThread | None = None

    def _acquired(self, times: int = 1) -> None:
        self._holder = self.machine.thread()
        self._holder.locks[self._number] += times

    def _releasing(self) -> int:
        """Forget one acquisition. Another thread than the holder may release a plain lock."""
        holder = self._holder
        times = 0 if holder is None else holder.locks[self._number]
        if holder is not None:
            holder.locks[self._number] = times - 1
            if times <= 1:
                del holder.locks[self._number]
        return times

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        got: bool = self._real.acquire(blocking, timeout)
        if got:
            self._acquired()
        return got

    def release(self) -> None:
        self._releasing()
        self._real.release()

    def locked(self) -> bool:
        return bool(self._real.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self._real._at_fork_reinit()
        self._holder = None


class _RLock(_Lock):
    """The same for a lock that its holder may acquire again. ``Condition`` calls the last three."""

    def _is_owned(self) -> bool:
        return bool(self._real._is_owned())

    def _release_save(self) -> tuple[Any, int]:
        times = self._releasing()
        if self._holder is not None:
            self._holder.locks.pop(self._number, None)
        return self._real._release_save(), times

    def _acquire_restore(self, state: tuple[Any, int]) -> None:
        self._real._acquire_restore(state[0])
        self._acquired(state[1])


def _locks(machine: Machine, patches: Patches) -> None:
    """Let new locks say which thread holds them."""
    for name, kind in (("Lock", _Lock), ("RLock", _RLock)):
        real = staticmethod(getattr(threading, name))
        own = type(name, (kind,), {"machine": machine, "make": real})
        patches.everywhere(threading, name, own)
