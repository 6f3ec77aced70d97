"""Compiles the forward of wrapped modules, inside the hooks that gather their parameters.

Dynamo does not trace the hooks, so each module is one graph, if its own forward has no graph break.
Blocks of one class share their code: the first one is compiled, and the others use it.
"""

from __future__ import annotations

import torch
from torch import nn


class CompiledForward:
    """``module.forward`` compiled, as long as it is not removed. It is an attribute of the object."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = vars(module).get("forward")  # of a program that has replaced it too
        module.forward = torch.compile(module.forward)

    def remove(self) -> None:
        """Use the forward from before."""
        if self._before is None:
            vars(self._module).pop("forward", None)
        else:
            self._module.forward = self._before
