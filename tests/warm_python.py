"""Runs a Python program in a process that has imported torch already.

A child of the fork server of the test kit takes over command, environment, working directory and outputs.
It saves the 2 to 4 s for which a new interpreter imports torch. Everything that the program starts is a
new process, as always.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

from zeroshard.testing.ranks import pool


class WarmPython:
    """What tests use of ``subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)``.

    ``command``: ``python -m module ...``, ``python script ...`` or a script in Python.
    """

    def __init__(self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> None:
        pool().warm()
        start = get_context("forkserver")
        pipes = [start.Pipe(duplex=False) for _ in range(2)]
        theirs = [write for _, write in pipes]
        self.args = [*command]
        given = (self.args, str(cwd), dict(env), *theirs)
        self._process = start.Process(target=_become, args=given)
        self._process.start()
        self.pid = self._process.pid
        self.stdout, self.stderr = (_reader(*ends) for ends in pipes)

    @property
    def returncode(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """See :attr:`returncode`."""
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Both outputs from now on, until all processes that write to them have ended."""
        texts = ["", ""]

        def read(i: int, file: TextIO) -> None:
            texts[i] = file.read()

        files = (self.stdout, self.stderr)
        readers = [threading.Thread(target=read, args=pair) for pair in enumerate(files)]
        for reader in readers:
            reader.start()
        for waits in (*readers, self._process):
            waits.join(timeout)
        if self.returncode is None or any(reader.is_alive() for reader in readers):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return texts[0], texts[1]

    def kill(self) -> None:
        """Kill it alone, and wait."""
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Kill it, and read the outputs of processes that it has started, until they end."""
        self.kill()
        self.communicate(timeout=30)
        for file in (self.stdout, self.stderr):
            file.close()
        self._process.close()


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float, **_: Any
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True, check=False, ...)``."""
    with contextlib.closing(WarmPython(command, cwd=cwd, env=env)) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def _reader(read: Connection, write: Connection) -> TextIO:
    """The file at our end of a pipe; closes both connections."""
    file = os.fdopen(os.dup(read.fileno()))
    read.close()
    write.close()
    return file


def _become(
    command: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection
) -> None:
    for fd, ours in enumerate((out, err), start=1):
        os.dup2(ours.fileno(), fd)
        ours.close()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # look at TMPDIR again
    sys.argv = command[1:] if command[0] == sys.executable else command
    is_module = sys.argv[0] == "-m"
    if is_module:
        del sys.argv[0]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    named = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [cwd if is_module else str(Path(sys.argv[0]).parent), *named, *installed]
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
