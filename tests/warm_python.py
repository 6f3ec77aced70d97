"""Runs a Python program in a process that has imported torch already.

A child of the fork server of the test kit takes over command, environment, working directory and outputs.
It saves the 2 to 4 s for which a new interpreter imports torch. Everything that the program starts is a
new process. With ``warm_ranks`` the Python programs among them are copies of the process that starts
them, and have imported torch too: for launchers, whose ranks would import it again. ``imports`` names
modules that the process imports before its program, so that such ranks do not import each of them alone.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import get_context, resource_tracker, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TextIO

from zeroshard_testing.ranks import pool


class WarmPython:
    """What tests use of ``subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True)``.

    ``command``: ``python -m module ...``, ``python -c code ...``, ``python script ...`` or a script in
    Python.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        warm_ranks: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        pool().warm()
        start = get_context("forkserver")
        pipes = [start.Pipe(duplex=False) for _ in range(2)]
        theirs = [write for _, write in pipes]
        self.args = [*command]
        given = (self.args, str(cwd), dict(env), *theirs, warm_ranks, imports)
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
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    timeout: float,
    warm_ranks: bool = False,
    imports: Sequence[str] = (),
    **_: Any,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run(command, capture_output=True, text=True, check=False, ...)``."""
    started = WarmPython(command, cwd=cwd, env=env, warm_ranks=warm_ranks, imports=imports)
    with contextlib.closing(started) as process:
        out, err = process.communicate(timeout)
        return subprocess.CompletedProcess(process.args, process.returncode or 0, out, err)


def _reader(read: Connection, write: Connection) -> TextIO:
    """The file at our end of a pipe; closes both connections."""
    file = os.fdopen(os.dup(read.fileno()))
    read.close()
    write.close()
    return file


def _become(
    command: list[str],
    cwd: str,
    env: dict[str, str],
    out: Connection,
    err: Connection,
    warm_ranks: bool,
    imports: Sequence[str],
) -> None:
    for fd, ours in enumerate((out, err), start=1):
        os.dup2(ours.fileno(), fd)
        ours.close()
    os.chdir(cwd)
    _forget_exit_handlers()
    if warm_ranks:
        _start_programs_as_copies()
    _run_to_the_end(command[1:] if command[0] == sys.executable else command, env, imports)


def _run_to_the_end(
    words: Sequence[str], env: Mapping[str, str], imports: Sequence[str] = ()
) -> NoReturn:
    """Run the program, and end this process as an interpreter ends."""
    code = 1
    alive: Any = None  # until after the exit handlers: the variables of the program
    try:
        try:
            alive = _run_program(words, env, imports)
            code = 0
        except SystemExit as end:
            alive = end
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
        except BaseException as error:
            alive = error
            sys.last_type, sys.last_value = type(error), error
            sys.last_traceback = error.__traceback__
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code if alive is not None else 1)


def _run_program(
    words: Sequence[str], env: Mapping[str, str], imports: Sequence[str]
) -> dict[str, Any]:
    """Run the program in this process, and return its variables."""
    set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # look at TMPDIR again
    sys.argv = [*words]
    how = sys.argv[0]
    if how == "-m":
        del sys.argv[0]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    named = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    here = os.getcwd() if how in ("-m", "-c") else str(Path(sys.argv[0]).parent)
    sys.path[:] = [here, *named, *installed]
    for name in imports:
        importlib.import_module(name)
    if how == "-c":
        variables = {"__name__": "__main__"}
        exec(compile(sys.argv.pop(1), "<string>", "exec"), variables)
        return variables
    if how == "-m":
        return runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    return runpy.run_path(sys.argv[0], run_name="__main__")


# ---------------------------------------------------------------- warm ranks


def _start_programs_as_copies() -> None:
    """Let ``subprocess`` start ``python -u script ...`` in a copy of this process."""
    start = subprocess.Popen.__init__

    def start_warm(self: Any, args: Any, *more: Any, **how: Any) -> None:
        if not isinstance(args, str) and [*args[:2]] == [sys.executable, "-u"]:
            sys.stdout.flush()  # what is in the buffers would be written by the copy too
            sys.stderr.flush()
            env = how.get("env") or {**os.environ}
            how["preexec_fn"] = partial(_be_a_copy, [*args[2:]], env, how.get("pass_fds", ()))
        start(self, args, *more, **how)

    subprocess.Popen.__init__ = start_warm


def _be_a_copy(words: Sequence[str], env: Mapping[str, str], keep: Sequence[int]) -> NoReturn:
    """What the new process does instead of ``exec``. Its outputs, session and directory are set."""
    try:
        _forget_the_parent(keep)
        _run_to_the_end(words, env)
    finally:
        os._exit(1)


def _forget_the_parent(keep: Sequence[int]) -> None:
    """Undo what ``exec`` undoes: open files, handlers of signals and of the exit."""
    gc.freeze()  # files of the parent's objects are closed here, not by a collection later
    tracker: int | None = resource_tracker._resource_tracker._fd
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > 2 and fd != tracker and fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) and number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as a new interpreter; subprocess resets them
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    _forget_exit_handlers()
    logging.root.handlers.clear()
    random.seed()
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1, closefd=False) for fd in (1, 2))


def _forget_exit_handlers() -> None:
    """What the process that was copied does at its exit, such as removing its folders, is not ours."""
    atexit._clear()
    weakref.finalize._registry.clear()
    weakref.finalize._registered_with_atexit = False
    atexit.register(logging.shutdown)
