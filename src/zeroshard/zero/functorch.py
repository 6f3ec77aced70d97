"""Lets code inside ``torch.func`` transforms (``grad``, ``vmap``, ``jvp``...) use sharded parameters.

Inside a transform every operation is rewritten, but collectives and storages cannot be. So the all-gather
suspends the transform; the full values then enter it as constants.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.utils import stateless

innermost = torch._C._functorch.peek_interpreter_stack
"""Returns the running ``torch.func`` transform, or None. A C++ function, cheap enough for hooks."""


def suspended() -> AbstractContextManager[Any]:
    """Operations inside the block are not rewritten by a transform."""
    return (
        contextlib.nullcontext() if innermost() is None else temporarily_clear_interpreter_stack()
    )


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that a transform was given: the one inside all its wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_wrapped(tensor: Tensor) -> bool:
    """Whether the tensor is a wrapper of a transform, which has no memory of its own."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


_FUNCTIONAL_CALL = stateless._functional_call.__code__


def in_functional_call() -> bool:
    """Whether a ``functional_call`` of torch runs, which puts tensors in place of parameters.

    Looks through the frames of the stack, a few microseconds.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is _FUNCTIONAL_CALL:
            return True
        frame = frame.f_back
    return False
