"""Calls the optimizer object's own ``step``: on all fragments at once, or chunk by chunk.

[Note: one step in several calls]

State on disk is in memory for one chunk at a time, so ``step`` has to be called for each. What an
optimizer counts for a group (``group["k"] += 1``) or for itself (``self.count += 1``,
``self.state["k"]``) must still advance once. So every call after the first starts from copies of the
options and attributes of before the step, and at the end those of the first call are put back. A group of
which the first call had no fragment keeps those of the first call that had one. What a dict has for a
fragment is that of the fragment's own call. Hooks of the program run once, before the first call and
after the last.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.optim.inner_optimizer import GLOBAL_POST, GLOBAL_PRE, has_hooks, without_hooks
from zeroshard.optim.state_tree import unkeyed
from zeroshard.zero.sharded_parameter import owner_of


class FragmentState(defaultdict[Any, Any]):
    """The ``state`` of an optimizer: by fragment.

    A parameter of the model is no key of it, and looking it up is an error.

    An empty dict, which torch's optimizers give for an unknown tensor, would read as "no state".
    """

    def __missing__(self, key: Any) -> Any:
        if owner_of(key) is not None:
            raise UsageError(
                "optimizer.state has the state of fragments that this rank owns, and none of a whole "
                f"parameter (here one of shape {tuple(key.shape)}). Every rank calls "
                "deepspeed.utils.safe_get_full_optimizer_state(param, name) or "
                "safe_set_full_optimizer_state(param, value, name) instead."
            )
        return super().__missing__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As a dict's, with the error of :meth:`__missing__` for a parameter of the model."""
        if key not in self and owner_of(key) is not None:
            self.__missing__(key)
        return super().get(key, default)


class SettledState(FragmentState):
    """The same, but ``settle()`` is called before values are given out.

    For state that an update may have changed before its step. ``dict.get(state, key)`` does not call it.
    """

    settle: Callable[[], None] = staticmethod(lambda: None)


def _settled(name: str) -> Any:
    """The method of :class:`FragmentState`, after ``settle()``."""
    method = getattr(FragmentState, name)

    @wraps(method)
    def settled(self: SettledState, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        return method(self, *args, **kwargs)

    return settled


for _name in (
    *("__getitem__", "get", "values", "items", "pop", "popitem", "setdefault", "copy"),
    *("__setitem__", "__delitem__", "clear", "update"),
):
    setattr(SettledState, _name, _settled(_name))


_NOT_COUNTED = {
    "train",
    "eval",
    "state",
    "param_groups",
    "defaults",
    "params",
    "found_inf",
    "grad_scale",
}

Members = Sequence[Sequence[Tensor]]
"""Fragments, by param group."""


def is_patched(inner: torch.optim.Optimizer) -> bool:
    """Whether the program gave the object another ``step``. Schedules of torch wrap it, which is none."""
    step: Any = vars(inner).get("step")
    while hasattr(step, "_wrapped_by_lr_sched"):
        step = step.__wrapped__
    return step is not None and getattr(step, "__func__", step) is not type(inner).step


class OptimizerObject:
    """Calls ``step`` of the optimizer object on some fragments, and refuses calls of the program.

    ``groups``: all fragments, by param group. The optimizer's groups list them between steps.
    """

    def __init__(self, inner: torch.optim.Optimizer, groups: Members) -> None:
        self.inner = inner
        self._groups = [list(params) for params in groups]
        self._runs = False
        self._guard = inner.register_step_pre_hook(self._refuse_direct_step)
        self._replaced: list[str] = []  # methods
        self._calls: _Calls | None = None
        self._step_args: tuple[tuple[Any, ...], dict[str, Any]] = ((inner,), {})

    def step(self, found_inf: Tensor | None = None, members: Members | None = None) -> None:
        """Run ``step`` on ``members`` of each group, or on all. It changes nothing if ``found_inf`` is 1.

        Hooks of the program run here, unless it is one of :meth:`several` calls.
        """
        inner = self.inner
        if self._calls is None and has_hooks(inner):
            with self._running():
                self._before_step()
                self._step(found_inf, members)
                self._after_step()
        else:
            self._step(found_inf, members)

    def _step(self, found_inf: Tensor | None, members: Members | None) -> None:
        inner, (args, kwargs) = self.inner, self._step_args
        if found_inf is not None:
            inner.found_inf, inner.grad_scale = found_inf, None  # type: ignore[attr-defined]
        try:
            self.call(lambda: inner.step(*args[1:], **kwargs), members)
        finally:
            if found_inf is not None:
                del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]

    def call(self, method: Callable[[], object], members: Members | None = None) -> None:
        """Call a method of the optimizer while its groups list ``members``."""
        inner, calls = self.inner, self._calls
        if calls is not None:
            calls.begin()
        if members is not None:
            self._list(members)
        try:
            with self._running(), without_hooks(inner):
                method()
        finally:
            if members is not None:
                self._list(self._groups)
        if calls is not None:
            calls.end(self._groups if members is None else members)

    @contextlib.contextmanager
    def several(self, *, hooks: bool = True) -> Iterator[None]:
        """Calls inside the block count as one. See [Note: one step in several calls]."""
        self._calls = calls = _Calls(self.inner)
        try:
            with self._running():
                if hooks:
                    self._before_step()
            yield
            if calls.kept is None and hooks:  # no fragment of this rank has a gradient
                self._step(None, [[] for _ in self._groups])
            calls.finish()
            with self._running():
                if hooks:
                    self._after_step()
        finally:
            self._calls = None

    def replace(self, name: str, method: Callable[..., Any]) -> None:
        """Replace a method of the optimizer until :meth:`close`."""
        self._replaced.append(name)
        setattr(self.inner, name, method)

    def close(self) -> None:
        """Let the program call ``step`` again. The groups have no parameters then."""
        self._guard.remove()
        for name in self._replaced:
            vars(self.inner).pop(name, None)
        self._replaced.clear()
        self._groups.clear()
        self.inner.state.clear()
        for group in self.inner.param_groups:
            group["params"] = []

    def _list(self, members: Members) -> None:
        for group, params in zip(self.inner.param_groups, members, strict=True):
            group["params"] = params

    def _before_step(self) -> None:
        args: tuple[Any, ...] = (self.inner,)
        kwargs: dict[str, Any] = {}
        hooks = [*GLOBAL_PRE.values(), *self.inner._optimizer_step_pre_hooks.values()]
        for hook in hooks:
            changed: Any = hook(self.inner, args, kwargs)
            if changed is not None:
                args, kwargs = changed
        self._step_args = args, kwargs

    def _after_step(self) -> None:
        (args, kwargs), self._step_args = self._step_args, ((self.inner,), {})
        hooks = chain(self.inner._optimizer_step_post_hooks.values(), GLOBAL_POST.values())
        for hook in list(hooks):
            hook(self.inner, args, kwargs)

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        before, self._runs = self._runs, True
        try:
            yield
        finally:
            self._runs = before

    def _refuse_direct_step(self, *_: object) -> None:
        """Refuse ``step()`` calls of the program. Without ``.grad`` they would do nothing."""
        if not self._runs:
            raise UsageError(
                "optimizer.step() was called directly. The gradients are sharded and belong to "
                "the engine: call engine.step(), which also clips gradients and advances the "
                "schedule."
            )


class _Calls:
    """Options and attributes of an optimizer in several calls that count as one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._before = [_copied(counted) for counted in self._counted()]
        self._had: set[int] = set()
        self.kept: list[dict[str, Any]] | None = None

    def begin(self) -> None:
        """Before a call."""
        if self.kept is not None:
            self._install([_copied(counted) for counted in self._before])

    def end(self, members: Members) -> None:
        """After a call on ``members``."""
        now = self._counted()
        kept = self.kept = self.kept or now
        if kept is not now:
            _merge(kept, now, {id(value) for params in members for value in params})
        for at, params in enumerate(members):
            if params and at not in self._had:
                self._had.add(at)
                kept[at + 1] = now[at + 1]

    def finish(self) -> None:
        """After the last call."""
        if self.kept is not None:
            self._install(self.kept)

    def _owners(self) -> list[dict[Any, Any]]:
        return [vars(self._inner), *self._inner.param_groups, self._inner.state]

    def _counted(self) -> list[dict[Any, Any]]:
        owners = self._owners()[:-1]
        return [
            *({key: value for key, value in o.items() if _is_counted(key)} for o in owners),
            unkeyed(self._inner.state),
        ]

    def _install(self, values: Sequence[dict[str, Any]]) -> None:
        for owner, counted in zip(self._owners(), values, strict=True):
            for key in [key for key in owner if _is_counted(key) and key not in counted]:
                del owner[key]
            owner.update(counted)


def _merge(
    kept: Sequence[dict[Any, Any]], now: Sequence[dict[Any, Any]], members: set[int]
) -> None:
    """Add the entries of dicts that a later call made for its ``members``, by tensor or by ``id``."""
    for before, after in zip(kept, now, strict=True):
        for name, found in after.items():
            there = before.get(name)
            if isinstance(found, dict) and isinstance(there, dict):
                _merge_dict(there, found, members)


def _merge_dict(kept: dict[Any, Any], now: dict[Any, Any], members: set[int]) -> None:
    if now is kept:
        return
    for key, found in now.items():
        there = kept.get(key)
        if key not in kept or (key if isinstance(key, int) else id(key)) in members:
            kept[key] = found
        elif isinstance(found, dict) and isinstance(there, dict):
            _merge_dict(there, found, members)


def _is_counted(key: Any) -> bool:
    if not isinstance(key, str):
        return not isinstance(key, Tensor)
    return key not in _NOT_COUNTED and not key.startswith("_optimizer_")


def _copied(value: Any) -> Any:
    """A copy of containers and tensors; parameters and other objects stay the same objects."""
    if isinstance(value, Tensor):
        return value if isinstance(value, torch.nn.Parameter) else value.clone()
    if type(value) in (dict, OrderedDict, defaultdict):
        copied = copy.copy(value)
        copied.update((key, _copied(item)) for key, item in value.items())
        return copied
    if type(value) is deque:
        return deque(map(_copied, value), value.maxlen)
    if type(value) in (list, tuple, set):
        return type(value)(map(_copied, value))
    return value
