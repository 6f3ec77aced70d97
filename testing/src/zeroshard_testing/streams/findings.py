"""What the checker finds, and where in the program."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import NamedTuple

import torch


class Frame(NamedTuple):
    """One line of the program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        parts = self.file.split(os.sep)
        return f"{os.sep.join(parts[-2:])}:{self.line} in {self.function}"


Site = tuple[Frame, ...]
"""The innermost lines of the program that led to an operation, innermost first."""

_OUTSIDE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    os.path.dirname(os.__file__) + os.sep + "threading.py",
    os.path.dirname(os.__file__) + os.sep + "concurrent",
    os.path.dirname(os.__file__) + os.sep + "contextlib.py",
    os.path.dirname(os.__file__) + os.sep + "weakref.py",
    "<frozen",
    "<string>",
)
_DEPTH = 5


@cache
def _is_outside(file: str) -> bool:
    return file.startswith(_OUTSIDE)


def here() -> Site:
    """The lines of the program that are running, without those of torch and of this package."""
    frames: list[Frame] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _DEPTH:
        code = frame.f_code
        if not _is_outside(code.co_filename):
            frames.append(Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(frames)


def line_of(site: Site) -> str:
    """The innermost line."""
    return str(site[0]) if site else "?"


KINDS = {
    "race": "two operations use the same memory, one of them writes, and nothing orders them",
    "reuse": "a freed block can be given out while another stream still uses it",
    "unpinned": "an asynchronous copy uses host memory that is not page-locked",
    "unpin": "page-locking ends while a copy may be in flight",
    "device": "tensors of different devices are mixed, or the host touches device memory",
    "family": "an event of torch.cuda meets a torch.Stream, which torch does not order",
    "thread": "a thread uses CUDA and has not selected a device",
}
"""Each kind of finding and what it means."""


@dataclass(frozen=True)
class Finding:
    """One mistake. ``where``: the operation that showed it. ``other``: the earlier one, if any."""

    kind: str
    text: str
    where: Site
    other: Site = ()
    phase: str = ""

    def __str__(self) -> str:
        lines = [f"{self.kind} in {self.phase or 'the program'}: {self.text}"]
        lines += [f"    at {frame}" for frame in self.where]
        if self.other:
            lines += ["  the other operation:", *(f"    at {frame}" for frame in self.other)]
        return "\n".join(lines)
