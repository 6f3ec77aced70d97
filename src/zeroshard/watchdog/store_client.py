"""Store operations with a deadline, for watchdogs whose main threads may be stuck.

A store client that two threads share deadlocks, and a store whose server is frozen never answers. So one
separate thread makes all operations, and the caller waits for its answer no longer than a deadline.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from zeroshard.comm.agreement import Store
from zeroshard.watchdog.diagnosis import Diagnosis

T = TypeVar("T")


class StoreLost(Exception):
    """The store did not answer in time, or its server is gone."""


class StoreClient:
    """Store operations with a deadline. ``store`` must be a client that nothing else uses."""

    def __init__(self, store: Store, *, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[Store], Any], _Answer] | None] = SimpleQueue()
        self._busy: _Answer | None = None
        self._turn = threading.Lock()
        self._thread = threading.Thread(
            target=_serve, args=(store, self._jobs), name=name, daemon=True
        )
        self._thread.start()

    def call(self, operation: Callable[[Store], T], timeout_s: float = 5.0) -> T:
        """The result of ``operation(store)``.

        Raises:
            StoreLost: no answer within ``timeout_s``, none to an earlier call yet, or an error of the
            store.
        """
        if threading.current_thread() is self._thread:  # garbage is collected in any thread
            raise StoreLost("the thread that would answer asks")
        if not self._turn.acquire(timeout=timeout_s):
            raise StoreLost("another call still waits")
        try:
            if self._busy is not None and not self._busy.done.is_set():
                raise StoreLost("an earlier call still waits")
            answer = self._busy = _Answer()
            self._jobs.put((operation, answer))
            if not answer.done.wait(timeout_s):
                raise StoreLost(f"no answer in {timeout_s:.0f} s")
        finally:
            self._turn.release()
        if answer.error is not None:
            raise StoreLost(str(answer.error)) from answer.error
        return cast("T", answer.value)

    def end(self) -> None:
        """Ask the thread to end, without waiting."""
        self._jobs.put(None)

    def close(self) -> None:
        """End the thread. After 2 s a thread that is stuck in the store is left, as a daemon."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)


class _Answer:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.value: Any = None
        self.error: Exception | None = None


def _serve(store: Store, jobs: SimpleQueue[tuple[Callable[[Store], Any], _Answer] | None]) -> None:
    while (job := jobs.get()) is not None:
        operation, answer = job
        try:
            answer.value = operation(store)
        except Exception as error:  # StoreClient.call raises it in the caller's thread
            answer.error = error
        answer.done.set()
        del operation, answer, job


def look(store: Store, key: str) -> str | None:
    """The value under ``key``; None, without waiting, if there is none."""
    return store.get(key).decode() if store.check([key]) else None


def read_verdict(store: Store, number: int, since: int = 0) -> tuple[Diagnosis, bool] | None:
    """The first fatal diagnosis of a question after ``since``, else that of question ``number``, if any.

    The second value: whether the rank that made it has reported it.
    """
    final = look(store, "final")
    if final is not None and json.loads(final)["number"] <= since:
        final = None
    text = final if final is not None else look(store, f"verdict/{number}")
    if text is None:
        return None
    found = json.loads(text)
    words = found["verdict"]
    return Diagnosis(**{**words, "ranks": tuple(words["ranks"])}), bool(found["reported"])


def write_verdict(store: Store, number: int, text: str, fatal: bool) -> None:
    """Publish the diagnosis of question ``number``. The first fatal diagnosis is never replaced."""
    if fatal and store.add("finals", 1) == 1:
        store.set("final", text)
    store.set(f"verdict/{number}", text)
