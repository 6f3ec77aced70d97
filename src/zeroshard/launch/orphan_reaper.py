"""Ends the ranks if the launcher itself is killed.

A small process reads from a pipe whose other end the launcher holds. The launcher writes the process
groups of its ranks to it. If the pipe closes without the line ``farewell``, the launcher is dead, and
the process kills those groups.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress

_PROGRAM = """
import os, signal, sys
groups = []
for line in sys.stdin:
    if line == "farewell\\n":
        sys.exit()
    groups.append(int(line))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


class OrphanReaper:
    """A helper process that kills the watched groups if this process ends without :meth:`dismiss`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
            text=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Kill these process groups if this process ends without :meth:`dismiss`."""
        self._write("".join(f"{group}\n" for group in groups))

    def dismiss(self) -> None:
        """End the reaper process without killing anything, because the groups have ended."""
        self._write("farewell\n")
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.wait()

    def _write(self, text: str) -> None:
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.write(text)
                self._process.stdin.flush()
