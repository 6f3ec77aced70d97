"""Lets an uncaught error of torch's transports end the program with the diagnosis of all ranks.

On a mesh the program's own calls may fail because another rank has ended: those of layers in a plain
``loss.backward()``. Their error says only that a connection closed. Where nobody catches it, Python calls
``sys.excepthook``, which is replaced while an engine on a mesh is open.
"""

from __future__ import annotations

import sys
import weakref
from types import TracebackType
from typing import Protocol


class Explains(Protocol):
    """What knows the diagnosis."""

    def explanation(self, error: BaseException | None) -> Exception | None:
        """See :meth:`~.session.CommSession.explanation`."""


_OPEN: weakref.WeakSet[Explains] = weakref.WeakSet()
_before = sys.excepthook


def explain_uncaught(session: Explains) -> None:
    """Ask ``session`` about uncaught errors from now on."""
    global _before
    if sys.excepthook is not _hook:
        _before, sys.excepthook = sys.excepthook, _hook
    _OPEN.add(session)


def leave_uncaught(session: Explains) -> None:
    """Do not ask ``session`` any more. The last one restores the hook of the program."""
    _OPEN.discard(session)
    if not _OPEN and sys.excepthook is _hook:
        sys.excepthook = _before


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    for session in list(_OPEN):
        if (found := session.explanation(error)) is not None:
            found.__cause__ = error
            kind, error = type(found), found.with_traceback(trace)
            break
    _before(kind, error, trace)
