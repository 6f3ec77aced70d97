"""The order in which a rank runs its wrapped modules, as one number.

The collectives inside modules that a tensor group shares are not ZeroShard's. If ranks of the group run
modules in different orders, such a collective adds parts of unrelated layers: training goes on with wrong
numbers and without an error. So each rank sends this number with the norm, and they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

_MULTIPLIER = 0x9E3779B97F4A7C15
_BITS = 48  # an fp64 represents integers below 2**53 exactly


class ModuleOrder:
    """A running hash over the forwards of wrapped modules."""

    def __init__(self) -> None:
        self._hash = 0

    @property
    def hash48(self) -> float:
        """The hash as a whole number that fp64 holds exactly."""
        return float(self._hash)

    def watch(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Note every forward of ``modules``, which all ranks list in one order. Returns the hooks."""

        def noting(place: int) -> Any:
            def note(_module: nn.Module, _args: Any) -> None:
                self._hash = (self._hash * _MULTIPLIER ^ place) % 2**_BITS

            return note

        return [
            module.register_forward_pre_hook(noting(place))
            for place, module in enumerate(modules, start=1)
        ]
