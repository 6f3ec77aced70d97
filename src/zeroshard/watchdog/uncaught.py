"""Lets an uncaught error end the program with the diagnosis of all ranks, without frames of libraries.

When another rank has ended, the program's own calls of ``torch.distributed`` fail, and on a mesh those of
layers in a plain ``loss.backward()``. Their error says only that a connection closed, and is replaced by
the diagnosis.

A diagnosis names another rank as the cause. Where this rank waited inside torch and this package explains
nothing, and would hide the traceback of the rank that failed. So only frames of the program are printed.
The same holds for a mistake of the program, whose message says what to do.

Where nobody catches an error, Python calls ``sys.excepthook``, which is replaced from the first call of
``initialize`` on, and while an engine is open. ``torch.distributed`` puts a hook of its own around the
one that it finds, so ours may be called by the hook to which it passes an error. It then passes the error
to the one that was there first.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

from zeroshard.errors import DistributedError, UnitStateError, ZeroShardError
from zeroshard.watchdog.stacks import OWN_FILES


class Explains(Protocol):
    """What knows the diagnosis."""

    def explanation(self, error: BaseException | None) -> Exception | None:
        """See :meth:`~.comm_session.CommSession.explanation`."""


_OPEN: weakref.WeakSet[Explains] = weakref.WeakSet()


class _Hooks:
    """What ``sys.excepthook`` was at first, what it was before ours, and whether ours runs."""

    first = before = staticmethod(sys.excepthook)
    ours_runs = False


def shorten_uncaught() -> None:
    """Print uncaught errors of this package without its frames from now on."""
    if sys.excepthook is not _hook:
        _Hooks.before, sys.excepthook = staticmethod(sys.excepthook), _hook


def watch_uncaught(session: Explains) -> None:
    """Shorten uncaught errors from now on, and ask ``session`` about those of others."""
    shorten_uncaught()
    _OPEN.add(session)


def leave_uncaught(session: Explains) -> None:
    """Do not ask ``session`` any more. The last one restores the hook of the program."""
    _OPEN.discard(session)
    if not _OPEN and sys.excepthook is _hook:
        sys.excepthook = _Hooks.before
        _Hooks.before = staticmethod(_Hooks.first)  # the restored one may call ours


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if _Hooks.ours_runs:
        _Hooks.first(kind, error, trace)
        return
    _Hooks.ours_runs = True
    try:
        _tell(kind, error, trace)
    finally:
        _Hooks.ours_runs = False


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for session in list(_OPEN):
        if (found := session.explanation(error)) is not None:
            kind, error = type(found), found.with_traceback(trace)
            sys.last_type, sys.last_value = kind, error  # what this rank leaves as its reason
            break
    if isinstance(error, DistributedError):
        error.__cause__, error.__suppress_context__ = None, True
    if isinstance(error, ZeroShardError) and not isinstance(error, UnitStateError):
        if isinstance(error.__cause__, ZeroShardError):  # its text is in the message
            error.__cause__, error.__suppress_context__ = None, True
        trace = of_program(trace)
        error = error.with_traceback(trace)
    _Hooks.before(kind, error, trace)


def of_program(trace: TracebackType | None) -> TracebackType | None:
    """The frames of a traceback that are not of torch or of this package; all, if there are no others."""
    kept = [at for at in _frames(trace) if not at.tb_frame.f_code.co_filename.startswith(OWN_FILES)]
    shorter: TracebackType | None = None
    for at in reversed(kept):
        shorter = TracebackType(shorter, at.tb_frame, at.tb_lasti, at.tb_lineno)
    return shorter or trace


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next
