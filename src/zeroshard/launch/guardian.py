"""Starts the process beside the launcher, which ends the ranks if the launcher itself is killed.

While it runs, what is written to the launcher's descriptor 2 passes through it
(:mod:`~.guardian_program` says why). What the launcher means to print goes past it.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from zeroshard.launch import guardian_program

_STDERR = 2


class Guardian:
    """A process that kills the watched groups if this one ends within the context."""

    def __enter__(self) -> Guardian:
        read_end, write_end = os.pipe()
        self._stderr = os.dup(_STDERR)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian_program.__file__)), str(read_end)],
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
