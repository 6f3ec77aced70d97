"""Who is told of the simulations of a search while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from zeroshard.planner.plan import Plan


class Audience(Protocol):
    """Is told of each simulation when it begins and when it has ended."""

    def begins(self, what: str) -> None:
        """A simulation begins. ``what``: the configuration that is simulated, in words."""

    def ended(self, plan: Plan | None) -> None:
        """The simulation that began last has ended. None: the configuration is not possible."""


class Silent:
    """An audience that tells nobody."""

    def begins(self, what: str) -> None:
        """Nothing is told."""

    def ended(self, plan: Plan | None) -> None:
        """Nothing is told."""


SILENT = Silent()
