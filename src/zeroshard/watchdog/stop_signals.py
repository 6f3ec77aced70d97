"""Notes signals that ask a process to end, so that it can end between two steps.

A Python signal handler runs in the main thread, between two lines of Python. A main thread that waits in
a collective never runs it. So the interpreter also writes the number of the signal into a socket
(``signal.set_wakeup_fd``), which the watchdog's thread reads at each look.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from functools import partial
from types import FrameType
from typing import Any

from zeroshard.errors import UsageError

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
