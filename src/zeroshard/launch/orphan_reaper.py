"""What ends the ranks if the launcher itself is killed?

A small process that holds the other end of a pipe. It is told the process groups of the ranks; when
the pipe closes without a word of farewell, nobody is left to stop them, and it kills them.
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
    """Watches over process groups from outside of this process, until :meth:`dismiss`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is not for it
            text=True,
        )

    def watch(self, groups: Iterable[int]) -> None:
        """Kill these process groups if this process disappears."""
        self._write("".join(f"{group}\n" for group in groups))

    def dismiss(self) -> None:
        """The groups ended: the guardian ends too, without touching anything."""
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
