"""Finds out which module runs, without hooks: from the frames of Python and the numbers of autograd."""

from __future__ import annotations

import sys
from bisect import bisect_left

import torch
from torch import nn
from torch.autograd import _get_sequence_nr  # type: ignore[attr-defined]

_FRAMES = 40
"""Frames that are looked at. A module's forward is few frames above the operation it calls."""


class Places:
    """Names of modules, by what runs at the moment.

    In forward, and where a checkpoint runs it again, the innermost ``self`` on the stack is the module.
    In backward no Python runs, but autograd numbers its nodes: the module of a node is the one that was
    running when the node was made. Costs about a microsecond for each frame.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name or "the model" for name, module in model.named_modules()}
        self._numbers: list[int] = []
        self._modules: list[str] = []

    def here(self) -> str:
        """The module of the operation that runs; "" if no module is known."""
        node = torch._C._current_autograd_node()
        if name := self._on_stack():
            if node is None:
                self._note(name)
            return name
        if node is None:
            return ""
        at = bisect_left(self._numbers, node._sequence_nr() + 1)
        return self._modules[at] if at < len(self._modules) else ""

    def _on_stack(self) -> str:
        frame = sys._getframe(2)
        for _ in range(_FRAMES):
            names = frame.f_code.co_varnames
            if names and names[0] == "self" and frame.f_code.co_name != "__torch_dispatch__":
                name = self._names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
            if frame.f_back is None:
                break
            frame = frame.f_back
        return ""

    def _note(self, name: str) -> None:
        number = _get_sequence_nr()
        if self._numbers and number <= self._numbers[-1]:  # no new node, or one of another thread
            return
        self._numbers.append(number)
        self._modules.append(name)
