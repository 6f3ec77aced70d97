"""The ``state`` of an optimizer whose parameters are sharded: keyed by fragment, not by parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from zeroshard.errors import UsageError
from zeroshard.zero.sharded_parameter import owner_of


class FragmentState(defaultdict[Any, Any]):
    """State by fragment. A parameter of the model is no key of it, and looking it up is an error.

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
