"""The order in which a rank runs its wrapped modules, as one number.

The collectives inside modules that a tensor group shares are not ZeroShard's. If ranks of the group run
modules in different orders, such a collective adds parts of unrelated layers: training goes on with wrong
numbers and without an error. So each rank sends this number with the norm, and they are compared.
"""

from __future__ import annotations

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

    def note(self, place: int) -> None:
        """Note a forward of the module at ``place`` of a list that all ranks share, from 1."""
        self._hash = (self._hash * _MULTIPLIER ^ place) % 2**_BITS
