"""An optimizer object: other tensors for it, a new one of its class and options, and its step hooks."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from zeroshard.optim.optimizers import Group

_ATTRIBUTES_OF_TORCH = ("step", "zero_grad", "train", "eval", "state", "param_groups", "defaults")
_PLAIN = (int, float, str, type, FunctionType, BuiltinFunctionType, functools.partial)

# Step hooks that the program registered for all optimizers.
GLOBAL_PRE: dict[int, Any] = torch_optimizer._global_optimizer_pre_hooks
GLOBAL_POST: dict[int, Any] = torch_optimizer._global_optimizer_post_hooks


def twin_of(optimizer: Optimizer, groups: Iterable[Group], *, lr: float | None = None) -> Any:
    """A new optimizer of the same class and options with other parameters, without hooks and state.

    Options are those of the groups, ``defaults``, and attributes of the object with plain values. ``lr``
    replaces the learning rate, which a schedule may have set to 0, so that steps would do nothing.
    """
    known = inspect.signature(type(optimizer)).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in known}
    attributes = {key: value for key, value in vars(optimizer).items() if _is_option(key, value)}
    for key, argument in known.items():
        if argument.default is inspect.Parameter.empty and key in attributes:
            defaults.setdefault(key, attributes[key])
    members = [{**_options(group, lr), "params": list(group["params"])} for group in groups]
    if any(_is_missing(argument, defaults) for argument in [*known.values()][1:]):
        # Nothing tells with which arguments it was made.
        twin: Any = object.__new__(type(optimizer))
        Optimizer.__init__(twin, members, _options(optimizer.defaults, lr))
    else:
        twin = type(optimizer)(members, **_options(defaults, lr))
    vars(twin).update(copy.deepcopy(attributes))
    return twin


def _options(source: Group, lr: float | None) -> Group:
    """A copy of the options of a group. ``lr``: replaces its learning rate; None: that stays."""
    kept = {key: value for key, value in source.items() if key not in ("params", "param_names")}
    if lr is not None and kept.get("lr") is not None:
        is_tensor = isinstance(kept["lr"], Tensor)
        kept["lr"] = torch.full_like(kept["lr"], lr) if is_tensor else lr
    return copy.deepcopy(kept)


def _is_missing(argument: inspect.Parameter, defaults: Group) -> bool:
    """Whether a constructor needs an argument that is not known."""
    named = argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    return named and argument.default is argument.empty and argument.name not in defaults


def _is_option(key: str, value: Any) -> bool:
    """Whether an attribute of an optimizer is an option that a new one must get too."""
    if key in _ATTRIBUTES_OF_TORCH or key.startswith("_optimizer_"):
        return False
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_option("", item) for item in value)
    if isinstance(value, dict):
        return all(_is_option("", item) for pair in value.items() for item in pair)
    return value is None or isinstance(value, _PLAIN)


def rebind(
    optimizer: Optimizer, params: Sequence[Sequence[Tensor]], *, fresh_state: bool = True
) -> None:
    """Make ``optimizer`` update other tensors, ``params[g]`` in group ``g``, without its old state.

    The groups stay the same dicts, so schedules keep working. State that a class makes in its constructor
    is made for the new tensors, unless ``fresh_state`` is false. A group may become empty, on a rank that
    owns none of its parameters.
    """
    for group, tensors in zip(optimizer.param_groups, params, strict=True):
        group["params"] = list(tensors)
        group.pop("param_names", None)
    optimizer.state.clear()
    if fresh_state:
        with contextlib.suppress(
            Exception
        ):  # the constructor needs more than groups: step() makes the state
            optimizer.state.update(twin_of(optimizer, optimizer.param_groups).state)


def has_hooks(inner: Optimizer) -> bool:
    """Whether the program registered step hooks, for the engine's optimizer or for all."""
    return hook_counts(inner) != (1, 0, 0, 0)  # one refuses direct calls of step()


def hook_counts(inner: Optimizer) -> tuple[int, ...]:
    """Numbers of step hooks: before and after, of this optimizer and of all."""
    pre, post = inner._optimizer_step_pre_hooks, inner._optimizer_step_post_hooks
    return len(pre), len(post), len(GLOBAL_PRE), len(GLOBAL_POST)


@contextlib.contextmanager
def without_hooks(inner: Optimizer) -> Iterator[None]:
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
