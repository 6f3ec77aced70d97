"""Finds out which module and line runs, without hooks: from frames of Python and numbers of autograd."""

from __future__ import annotations

import os
import sys
from bisect import bisect_left
from types import CodeType
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

import zeroshard

_FRAMES = 40
"""Frames that are looked at. A module's forward is few frames above the operation it calls."""

LIBRARIES = tuple(
    os.path.dirname(module.__file__) + os.sep for module in (torch, zeroshard) if module.__file__
)
"""Prefixes of the files of torch and of this package. A program may be in any folder."""

_PLANNER = os.path.dirname(__file__) + os.sep
"""Above its frames is what has called the planner."""


class Place(NamedTuple):
    """``module``: its name. ``line``: file and line outside of torch and this package. "": not known."""

    module: str = ""
    line: str = ""


NOWHERE = Place()


class Places:
    """Modules and lines, by what runs at the moment.

    In forward, and where a checkpoint runs it again, the innermost ``self`` on the stack is the module.
    In backward no Python runs, but autograd numbers its nodes: the place of a node is the one that was
    running when the node was made. Without ``model`` only lines are found, and none in backward. Costs
    about a microsecond for each frame.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        modules = () if model is None else model.named_modules()
        self._names = {id(module): name or "the model" for name, module in modules}
        self._numbers: list[int] = []
        self._places: list[Place] = []
        self._files: dict[CodeType, str] = {}  # "": of torch or of this package

    def here(self) -> Place:
        """The place of the operation that runs."""
        node = torch._C._current_autograd_node()
        found = self._on_stack()
        if found.module:
            if node is None:
                self._note(found)
            return found
        if node is None:
            return found
        at = bisect_left(self._numbers, node._sequence_nr() + 1)
        return self._places[at] if at < len(self._places) else NOWHERE

    def _on_stack(self) -> Place:
        frame = sys._getframe(2)
        module = line = ""
        inside = True  # the frames of the planner that have called this
        for _ in range(_FRAMES):
            code = frame.f_code
            planner = code.co_filename.startswith(_PLANNER)
            if planner and not inside:
                break
            inside = inside and planner
            names = code.co_varnames
            if not module and names and names[0] == "self" and not planner:
                module = self._names.get(id(frame.f_locals.get("self")), "")
            if not line and (file := self._file(code)):
                line = f"{file}:{frame.f_lineno}"
            if (module and line) or frame.f_back is None:
                break
            frame = frame.f_back
        return Place(module, line)

    def _file(self, code: CodeType) -> str:
        found = self._files.get(code)
        if found is None:
            name = code.co_filename
            found = "" if name.startswith((*LIBRARIES, "<")) else short(name)
            self._files[code] = found
        return found

    def _note(self, place: Place) -> None:
        number = _get_sequence_nr()
        if self._numbers and number <= self._numbers[-1]:  # no new node, or one of another thread
            return
        self._numbers.append(number)
        self._places.append(place)


def short(file: str) -> str:
    """The name of a file from its folder on ``sys.path`` on; all of it if there is none."""
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    inside = [folder for folder in folders if file.startswith(folder)]
    return file[len(max(inside, key=len)) :] if inside else file
