"""Where ranks are in Python: the frames of threads, and the stack of a process that stands still.

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
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import ClassVar, TextIO

import torch

from zeroshard.comm.host import Process, catches, fate_of
from zeroshard.core.files import for_this_user
from zeroshard.run.recordings import STACKS

TORCH = "torch.distributed"
"""Label of the sequence of calls that a program itself makes. Their numbers are not known."""
SIGNAL = int(getattr(signal, "SIGRTMAX", 0)) - 9
"""A real-time signal that no library known to us uses; negative where there are none (macOS)."""
_WAIT_S = 1.0
_FRAMES = 8
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Prefixes of the files whose frames are not the program's. They are absolute, since a program may be in
#: a folder of any name.
OWN_FILES = (
    *(
        _PACKAGE + part + os.sep
        for part in (
            "run", "comm", "watchdog", "session", "metrics", "device", "memory", "offload", "optim",
            "precision", "zero", "checkpoint", "experts", "parallel", "sequence", "data", "engine",
            "deepspeed", "integrations",
        )
    ),
    _TORCH, threading.__file__, contextlib.__file__,
)  # fmt: skip
#: Files of ZeroShard that call ``torch.distributed``.
_COLLECTIVES = (
    _PACKAGE + "comm" + os.sep,
    _PACKAGE + "watchdog" + os.sep,
    _PACKAGE + "session" + os.sep,
    _PACKAGE + os.path.join("deepspeed", "collectives.py"),
)
#: Where the program's thread waits while torch computes gradients of tensors on a device.
_BACKWARD = (os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward")
_LIBRARIES = (
    _PACKAGE,
    "<frozen ",
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)
#: (file, function; "" is any function) -> what the program does in it.
_PHASES = {
    (_PACKAGE + os.path.join("zero", "init.py"), ""): "zero.Init",
    (_PACKAGE + os.path.join("zero", "access.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "gathered.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "sharded_parameter.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "hooks.py"), ""): "forward",
    (_PACKAGE + os.path.join("engine", "build.py"), ""): "initialize",
    (_PACKAGE + os.path.join("engine", "optimizer_step.py"), ""): "step",
    (_PACKAGE + os.path.join("engine", "export.py"), ""): "export",
    **{
        (_PACKAGE + os.path.join("engine", file), function): phase
        for file in ("engine.py", "training_engine.py", "engine_base.py")
        for function, phase in {
            "forward": "forward",
            "backward": "backward",
            "step": "step",
            "save_checkpoint": "save",
            "wait_for_checkpoint": "save",
            "load_checkpoint": "load",
            "close": "close",
        }.items()
    },
    (_TORCH + os.path.join("autograd", "__init__.py"), ""): "backward",
}
_OF_ANYBODY = {
    "generate": "generate",
    "from_pretrained": "from_pretrained",
    "save_pretrained": "export",
    "save_state": "save",
    "load_state": "load",
}
_CALLS_OF_TORCH = _TORCH + os.path.join("distributed", "distributed_c10d.py")
_WAIT_OF_TORCH = (_TORCH + os.path.join("distributed", "_functional_collectives.py"), "wait_tensor")
"""Where the host waits for a collective of a DTensor."""
_BLOCKING = (_CALLS_OF_TORCH, _WAIT_OF_TORCH[0], _TORCH + "_ops.py")
"""Files of the innermost frame in such a call."""


def stack_line(thread: int) -> str:
    """Where a thread is, on one line, innermost first: the line that called ZeroShard or torch, which may
    be a library's, and the program's lines that led to it.

    ``accelerator.py:3021 save_state < train.py:88 save < train.py:120 main``
    """
    frames = list(_frames(thread))
    theirs = [f for f in frames if not f.f_code.co_filename.startswith(OWN_FILES)] or frames
    shown = theirs[:1] + [f for f in theirs[1:] if not f.f_code.co_filename.startswith(_LIBRARIES)]
    return " < ".join(
        f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}"
        for f in shown[:_FRAMES]
    )


def phase(thread: int) -> str:
    """What the program does with ZeroShard in ``thread``: its outermost call with a name; "" if none."""
    found = ""
    for frame in _frames(thread):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        own = _PHASES.get((file, function)) or _PHASES.get((file, ""))
        if own is None and not file.startswith(OWN_FILES):
            own = _OF_ANYBODY.get(function)
        found = own or found
    return found


def call_of_torch(thread: int) -> tuple[FrameType, str] | None:
    """The frame and name of the call of ``torch.distributed`` that the program itself is in, if any."""
    frames = _frames(thread)
    innermost = frame = next(frames, None)
    if innermost is None or innermost.f_code.co_filename not in _BLOCKING:
        return None
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        code = frame.f_code
        if (
            code.co_filename == _CALLS_OF_TORCH
            or (code.co_filename, code.co_name) == _WAIT_OF_TORCH
        ):
            name = code.co_name
        frame = next(frames, None)
    if not name:  # some operation of torch
        return None
    ours = frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES)
    return None if ours else (innermost, f"{TORCH}.{name}")


def _frames(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first.

    During a backward on a device, torch runs hooks on a thread of its own while the program's thread
    waits for it. The frames of such hooks come first.
    """
    first: list[FrameType] = []
    current = sys._current_frames()
    frame = current.get(thread)
    if frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD:
        named = {t.ident for t in threading.enumerate() if type(t) is not threading._DummyThread}
        first = [current[ident] for ident in sorted(current.keys() - named)]
    # One of these frames is this one. A reference to it would keep the locals of all threads alive until
    # the garbage collector runs.
    del current
    for hook in first:
        yield from _outwards(hook)
    yield from _outwards(frame)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_of(thread: int) -> str:
    """The whole stack of a thread, the innermost frame last; "" if there is no such thread."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def stacks(last: int | None = _FRAMES) -> str:
    """The stacks of all threads of this process. ``last``: so many innermost frames; None: all."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-(last or 0) :]
        name = names.get(ident, f"thread {ident} of torch")
        parts.append(f"{name}:\n{''.join(lines)}")
    return "\n".join(parts)


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
