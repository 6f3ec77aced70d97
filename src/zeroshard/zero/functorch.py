"""How do ``torch.func`` transforms (``grad``, ``vmap``, ``jvp``...) meet sharded parameters?

Inside a transform every operation is rewritten, collectives and storages included, which know nothing of
it. So gathering steps out of the transform for a moment; the full values then enter it like any constant.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

innermost = torch._C._functorch.peek_interpreter_stack
"""The ``torch.func`` transform that this code is called from, or None: a call of C++, for hot paths."""


def suspended() -> AbstractContextManager[Any]:
    """Inside the block operations are not rewritten."""
    return (
        contextlib.nullcontext() if innermost() is None else temporarily_clear_interpreter_stack()
    )


def unwrapped(tensor: Tensor) -> Tensor:
    """What a transform was given: the tensor below all its wrappers."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def is_wrapped(tensor: Tensor) -> bool:
    """Is it a transform's wrapper, which has no memory of its own?"""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
