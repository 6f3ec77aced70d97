"""The ``state`` of an optimizer whose parameters are sharded: keyed by fragment, not by parameter."""

from __future__ import annotations

from collections import defaultdict
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
