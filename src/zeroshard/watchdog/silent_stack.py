"""The Python stack of a rank that runs but does not answer: its interpreter may stand still.

[Note: silent stacks] A process with a watchdog has a handler for :data:`SIGNAL` that writes the stack of
the thread that the signal interrupts into a file beside its recordings. The handler is that of
``faulthandler``, which needs no interpreter lock. Another process of this user and host sends the signal
to the main thread, once for a question that was not answered.

A timer of the process itself, ``faulthandler.dump_traceback_later``, would need no signal. But its thread
reads the frames of threads that run meanwhile, which may end the process with a segmentation fault: so it
did (CPython 3.11, ``_Py_DumpTracebackThreads``) when a process went on after a pause that was longer than
the timer. A handler reads the frames of the thread that it interrupts, and of no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path
from typing import ClassVar, TextIO

from zeroshard.comm.host import Process, catches, fate_of
from zeroshard.core.files import for_this_user
from zeroshard.run.recordings import STACKS

SIGNAL = int(getattr(signal, "SIGRTMAX", 0)) - 9
"""A real-time signal that no library known to us uses; negative where there are none (macOS)."""
_WAIT_S = 1.0


class StackFile:
    """The file of this process. There is none if the program has a handler of its own for the signal.

    A process has one handler; the newest object's file gets the stacks.
    """

    _newest: ClassVar[StackFile | None] = None
    _has_handler: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / STACKS
        self._owner = os.getpid()
        self._file: TextIO | None = None
        if SIGNAL > 0 and (StackFile._has_handler or not catches(os.getpid(), SIGNAL)):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = open(self._path, "a", opener=for_this_user)  # noqa: SIM115
            StackFile._newest, StackFile._has_handler = self, True
            faulthandler.register(SIGNAL, self._file, all_threads=False)

    def close(self) -> None:
        """Remove the file. Does nothing in a forked child, whose file it is not."""
        if self._file is None or os.getpid() != self._owner:
            return
        if StackFile._newest is self:
            # The handler stays. Without one, a signal that is on its way would end this process.
            StackFile._newest = None
            faulthandler.register(SIGNAL, 2, all_threads=False)
        self._file.close()
        with contextlib.suppress(OSError):  # the folder may have other files
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()


def ask(process: Process, here: Process, path: Path) -> str:
    """The stack of the main thread of ``process``, innermost frame first; "" if it cannot be had.

    ``path``: its stack file. Waits up to a second. The signal is sent to no process without that file or
    without a handler, which it would end.
    """
    if fate_of(process, here)[0] != "runs" or not path.exists() or not catches(process.pid, SIGNAL):
        return ""
    with contextlib.suppress(OSError):
        os.truncate(path, 0)
        _signal_main_thread(process.pid)
        until_s = time.monotonic() + _WAIT_S
        while not (text := path.read_text(errors="replace")) and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(0.01)  # a stack is written line by line
        return path.read_text(errors="replace") if text else ""
    return ""


def _signal_main_thread(pid: int) -> None:
    """A signal to a whole process may interrupt any of its threads, also one that runs no Python."""
    library = ctypes.CDLL(None)
    if hasattr(library, "tgkill"):  # glibc 2.30
        library.tgkill(pid, pid, SIGNAL)
    else:
        os.kill(pid, SIGNAL)


def innermost(stack: str) -> str:
    """The innermost frame of a stack that the fault handler wrote: ``file:line name``, or ""."""
    main = stack.rpartition("most recent call first")[2]
    for line in main.splitlines():
        words = line.strip().split('"')
        if len(words) == 3 and words[0] == "File ":
            number, _, name = words[2].removeprefix(", line ").partition(" in ")
            return f"{Path(words[1]).name}:{number} {name}"
    return ""
