"""The process beside a launcher. It ends the ranks if the launcher is killed, and folds torch's lines.

:class:`Guardian` starts it; this file is also its program, so it imports little.

The launcher holds the other ends of two pipes. On standard input come the process groups of its ranks, a
line each. If that ends without the line ``farewell``, the launcher is dead, and the groups are killed.

In the other pipe comes what the launcher's own C++ code and interpreter print (its descriptor 2), the
last words of a launcher that crashes included: so no thread of the launcher reads it. What the launcher
means to print goes past it. It is printed as it is, with one exception. Torch's store prints a stack of
C++ code for each message that it cannot read, and every process of the host can send it such messages.
Each kind of them gets a line, and the others are counted.
"""

from __future__ import annotations

import _thread
import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_HEAD = b"] [c10d] Error processing client message: "
"""In a line of torch's store, after the file and line of its code. A stack and an empty line follow."""
_STACK = (b"Exception raised from ", b"frame #", b"<omitting python frames>")
_KINDS = 8
"""Kinds of messages that get a line. Their words are torch's; what a sender chose can be among them."""
_WORDS = 160
_LINE_NBYTES = 64 << 10
_STDERR = 2
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask a run to save, or to end in order: it needs this process until it has."""


class Fold:
    """Passes lines on to ``write``; of the store's refusals only the first of each kind, as one line."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._partial = b""
        self._is_inside = False  # the next line can be one of the stack
        self._told: set[bytes] = set()
        self._count = 0  # refusals without a line

    def feed(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        # A prompt or a progress bar has no end; only the beginning of a refusal is worth a wait.
        if not self._is_inside and not self._may_be_refusal(self._partial):
            self._pass_on()

    def finish(self) -> None:
        """Pass on what is left, and say how many refusals had no line."""
        self._pass_on()
        if self._count:
            self._say(f"{self._count:,} more such messages came to the store of this run.")

    def _line(self, line: bytes) -> None:
        if self._is_inside and (line.startswith(_STACK) or line == b"\n"):
            self._is_inside = line != b"\n"
            return
        before, head, words = line.partition(_HEAD)
        is_refusal = bool(head) and before.startswith(b"[")
        if not is_refusal:
            # A line of another process may come in the middle of a stack, which can be longer than what a
            # pipe takes at once. Another message of torch begins with a bracket.
            self._is_inside = self._is_inside and not line.startswith(b"[")
            self._write(line)
            return
        self._is_inside = True
        kind = words.partition(b".")[0]
        if kind in self._told or len(self._told) == _KINDS:
            self._count += 1
            return
        self._told.add(kind)
        reason = words.strip()[:_WORDS].decode(errors="replace")
        self._say(
            "a client sent the store of this run bytes that are not a message, and was disconnected "
            f"({reason}). Others like it are only counted."
        )

    def _may_be_refusal(self, partial: bytes) -> bool:
        return partial.startswith(b"[") and len(partial) < _LINE_NBYTES

    def _pass_on(self) -> None:
        self._write(self._partial)
        self._partial = b""

    def _say(self, text: str) -> None:
        self._write(f"zeroshard: {text}\n".encode())


class Guardian:
    """A process that kills the watched groups if this one ends within the context."""

    def __enter__(self) -> Guardian:
        read_end, write_end = os.pipe()
        self._stderr = os.dup(_STDERR)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(read_end)],
            stdin=subprocess.PIPE,
            pass_fds=[read_end],
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
            text=True,
        )
        os.dup2(write_end, _STDERR)
        os.close(read_end)
        os.close(write_end)
        return self

    def __exit__(self, *_: object) -> None:
        os.dup2(self._stderr, _STDERR)
        os.close(self._stderr)
        self._write("farewell\n")
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    @contextmanager
    def past(self, console: TextIO) -> Iterator[TextIO]:
        """A context with ``console``, past the process where that is this process's standard error."""
        try:
            is_stderr = console.fileno() == _STDERR
        except (OSError, ValueError):  # it is no file
            is_stderr = False
        if not is_stderr:
            yield console
            return
        console.flush()
        raw = os.fdopen(os.dup(self._stderr), "wb")
        direct = io.TextIOWrapper(raw, console.encoding, "backslashreplace", line_buffering=True)
        try:
            yield direct
        finally:
            with suppress(OSError):  # what is left in its buffer, if the console was closed
                direct.close()

    def watch(self, groups: Iterable[int]) -> None:
        """Kill these process groups if this process ends within the context."""
        self._write("".join(f"{group}\n" for group in groups))

    def _write(self, text: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(text)
                self._process.stdin.flush()


def copy(source: int, over: int, sink: int, done: _thread.LockType) -> None:
    """Fold what comes from ``source`` until it ends, or ``over`` is readable and nothing is left."""

    def write(data: bytes) -> None:
        while data:
            try:
                data = data[os.write(sink, data) :]
            except OSError:  # the console was closed, which must not end the run
                return

    fold = Fold(write)
    waits = [source, over]
    while source in select.select(waits, [], [])[0]:
        if not (data := os.read(source, 1 << 16)):
            break
        fold.feed(data)
    fold.finish()
    done.release()


def main(words: list[str]) -> None:
    """``words``: the descriptor with what the launcher prints."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    over, end = os.pipe()
    done = _thread.allocate_lock()
    done.acquire()
    # A console that does not read must not keep alive the ranks of a launcher that is dead.
    _thread.start_new_thread(copy, (int(words[0]), over, _STDERR, done))
    groups: list[int] = []
    for line in sys.stdin:
        if line == "farewell\n":
            groups.clear()
            break
        groups.append(int(line))
    for group in groups:
        with suppress(OSError):  # it has ended
            os.killpg(group, signal.SIGKILL)
    os.close(end)
    done.acquire()


if __name__ == "__main__":
    main(sys.argv[1:])
