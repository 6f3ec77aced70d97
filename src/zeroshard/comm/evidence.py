"""What can be found out about a rank: from its own answer, or from what its host shows of it?"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zeroshard.comm.host import Process, fate_of
from zeroshard.comm.recorder import read_box, remove_box
from zeroshard.core.flight import Flight, Record
from zeroshard.core.verdict import Witness

_FRAMES = 8
_PACKAGE = Path(__file__).parents[1]
_LAYERS = ("comm", "zero", "engine", "checkpoint", "store", "native", "integrations")
_OWN = (
    *(f"{_PACKAGE / layer}{os.sep}" for layer in _LAYERS),
    f"{Path(torch.__file__).parent}{os.sep}",
    *(str(module.__file__) for module in (threading, contextlib)),
)
"""How the file names of frames that are not the program's begin. Compared from the start: a program may
lie in a folder of any name."""


@dataclass(frozen=True)
class Peer:
    """A rank, its process and where its flight log lies on its host."""

    rank: int
    process: Process
    box: str

    def far(self) -> Peer:
        """The same rank, of which this host can see nothing."""
        return replace(self, process=replace(self.process, space=""))

    def fate(self, here: Process) -> tuple[str, str]:
        """As :func:`zeroshard.comm.host.fate_of`."""
        return fate_of(self.process, here)

    def has_left(self, here: Process) -> bool:
        """Whether it closed its engine, or its process ended, as far as this host can tell."""
        if not self.is_on(here):
            return False
        return not Path(self.box).exists() or self.fate(here)[0] == "gone"

    def is_on(self, here: Process) -> bool:
        """Whether this host sees the rank's process and files."""
        return bool(here.space) and self.process.space == here.space

    def remove_files(self) -> None:
        """Remove its log and its stack file, of which this host holds the paths."""
        remove_box(Path(self.box + ".stack"))
        remove_box(Path(self.box))


def witness_from_answer(peer: Peer, answer: Mapping[str, Any]) -> Witness:
    """The witness that a rank is for itself."""
    flight = Flight(*answer["flight"])
    records = tuple(Record(*r) for r in flight.records)
    return Witness(
        rank=peer.rank,
        flight=flight._replace(records=records),
        blocked_s=answer["blocked_s"],
        stack=answer["stack"],
        stacks=answer["stacks"],
        host=peer.process.host,
    )


def witness_from_host(peer: Peer, here: Process, *, asked: bool = True) -> Witness:
    """What this host knows of a rank that does not answer, or could not be ``asked``."""
    fate, detail = peer.fate(here)
    if fate == "runs" and peer.has_left(here):
        fate, detail = "left", "closed its engine"
    flight = read_box(Path(peer.box)) if fate != "unknown" else None
    stack = _dumped_stack(Path(peer.box + ".stack")) if fate != "unknown" else ""
    if fate == "unknown" or (fate == "runs" and asked):
        where = f" (in {stack})" if stack else ""
        fate, detail = "silent", f"its process runs but does not answer{where}"
        if flight is None:
            detail = "does not answer"
    return Witness(
        rank=peer.rank,
        flight=flight,
        fate=fate,
        detail=detail,
        answered=False,
        stack=stack,
        host=peer.process.host,
    )


def without_connection(witness: Witness) -> Witness:
    """A connection to this rank broke: if it runs and does not wait, it dropped its end."""
    if witness.fate == "silent":
        return replace(witness, fate="gone", detail="its connection closed; it does not answer")
    if witness.fate == "runs" and not (witness.flight and witness.flight.waiting):
        return replace(witness, fate="left", detail="it closed its end of the connection")
    return witness


def stack_line(thread: int) -> str:
    """Where a thread is, innermost first, on one line; frames of ours and torch's are left out.

    ``train.py:88 forward < train.py:120 main``
    """
    frame = sys._current_frames().get(thread)
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    theirs = [f for f in frames if not f.f_code.co_filename.startswith(_OWN)]
    return " < ".join(
        f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}"
        for f in (theirs or frames)[:_FRAMES]
    )


def stacks() -> str:
    """The stacks of all threads of this process, for the dump."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-_FRAMES:]
        parts.append(f"{names.get(ident, ident)}:\n{''.join(lines)}")
    return "\n".join(parts)


class FrozenStack:
    """Writes this process's stacks from a thread that needs no interpreter, if it stands still.

    The timer is the process's only one; engines that share a process take turns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self._owner = os.getpid()

    def arm(self, after_s: float) -> None:
        """Not now, but in ``after_s``, unless armed again by then."""
        faulthandler.dump_traceback_later(after_s, file=self._file)

    def close(self) -> None:
        """Stop the timer and remove the file. In a forked child both are the parent's."""
        if os.getpid() != self._owner:
            return
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        remove_box(self._path)


def _dumped_stack(path: Path) -> str:
    """The innermost frame that the fault handler wrote of a main thread, ``file:line name``."""
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")
        main = text.rpartition("most recent call first")[2]
        for line in main.splitlines():
            words = line.strip().split('"')
            if len(words) == 3 and words[0] == "File ":
                number, _, name = words[2].removeprefix(", line ").partition(" in ")
                return f"{Path(words[1]).name}:{number} {name}"
    return ""
