"""The step hooks of an optimizer, and those that the program registered for all optimizers."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

GLOBAL_PRE: dict[int, Any] = torch_optimizer._global_optimizer_pre_hooks
GLOBAL_POST: dict[int, Any] = torch_optimizer._global_optimizer_post_hooks


def has_hooks(inner: torch.optim.Optimizer) -> bool:
    """Whether the program registered step hooks, for the engine's optimizer or for all."""
    return hook_counts(inner) != (1, 0, 0, 0)  # one refuses direct calls of step()


def hook_counts(inner: torch.optim.Optimizer) -> tuple[int, ...]:
    """Numbers of step hooks: before and after, of this optimizer and of all."""
    pre, post = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
    return len(pre), len(post), len(GLOBAL_PRE), len(GLOBAL_POST)


@contextlib.contextmanager
def without_hooks(inner: torch.optim.Optimizer) -> Iterator[None]:
    """``step`` runs no hooks inside the block."""
    own = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
    kept = [(hooks, dict(hooks)) for hooks in (GLOBAL_PRE, GLOBAL_POST)]
    inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks = own
        for hooks, entries in kept:
            hooks.update(entries)
