"""The states of an engine, the allowed transitions, and the check that every call makes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from zeroshard.errors import UsageError


class EngineState(Enum):
    """The states of an engine and the transitions between them. They decide which calls are allowed.

    OPEN --offload()--> OFFLOADED --reload()--> OPEN
    OPEN or HALF_LOADED --begin_load()--> HALF_LOADED --end_load()--> OPEN
    OPEN --fail()--> FAILED; from every state --close()--> CLOSED
    """

    OPEN = "open"
    OFFLOADED = "offloaded"  # some state is in host memory until reload_states()
    HALF_LOADED = "half loaded"  # a load ended in the middle: parameters and state are of two runs
    FAILED = "failed"  # an update ended in the middle: parameters are of two steps
    CLOSED = "closed"


_EDGES = frozenset(
    [
        (EngineState.OPEN, EngineState.OFFLOADED),
        (EngineState.OFFLOADED, EngineState.OFFLOADED),
        (EngineState.OFFLOADED, EngineState.OPEN),
        (EngineState.OPEN, EngineState.HALF_LOADED),
        (EngineState.HALF_LOADED, EngineState.HALF_LOADED),
        (EngineState.HALF_LOADED, EngineState.OPEN),
        (EngineState.OPEN, EngineState.FAILED),
        *((state, EngineState.CLOSED) for state in EngineState),
    ]
)

_HALF_LOADED = (
    "loading a checkpoint did not finish: parameters and optimizer state belong to different "
    "runs. Load another checkpoint, or this one once its files are restored."
)


KINDS = ("optim_states", "hp_params", "lp_params", "lp_grads")
"""What can be offloaded, by DeepSpeed's names: optimizer state, masters, parameters, gradients."""


@dataclass(eq=False)
class Life:
    """The state of one engine. ``offloaded``: the kinds of :data:`KINDS` that are in host memory."""

    state: EngineState = EngineState.OPEN
    is_open: bool = True  # every call is allowed, so :meth:`check` need not be called
    offloaded: frozenset[str] = frozenset()
    _failure: str = ""

    def check(self, call: str = "", *needs: str, may_load: bool = False) -> None:
        """Raise unless the engine is in a state in which the call is allowed.

        ``call``: what the program called; "" if it works while state is offloaded. ``needs``: the kinds
        that it needs on the device; empty: all. ``may_load``: it may be called after a load that failed.

        Raises:
            UsageError: the engine is in another state; the text says what to do.
        """
        if self.state is EngineState.OPEN:
            return
        if self.state is EngineState.CLOSED:
            raise UsageError("this engine was closed; build a new one to continue.")
        if self.state is EngineState.FAILED:
            raise UsageError(self._failure)
        if self.state is EngineState.HALF_LOADED and not may_load:
            raise UsageError(_HALF_LOADED)
        missing = [kind for kind in KINDS if kind in self.offloaded and kind in (needs or KINDS)]
        if call and missing:
            raise UsageError(
                f"{call} while {', '.join(missing)} are stored in host memory "
                "(engine.offload_states()): call engine.reload_states() first."
            )

    # ------------------------------------------------------------------ transitions

    def offload(self, kinds: Collection[str]) -> None:
        """Note that these kinds leave the device."""
        self._move(EngineState.OFFLOADED)
        self.offloaded |= frozenset(kinds)

    def reload(self) -> None:
        """Note that everything is on the device again."""
        self.offloaded = frozenset()
        if self.state is EngineState.OFFLOADED:
            self._move(EngineState.OPEN)

    def begin_load(self) -> None:
        """Note that values of a checkpoint begin to replace those of the engine."""
        self._move(EngineState.HALF_LOADED)

    def end_load(self) -> None:
        """Note that a load is complete: all values are of one run."""
        if self.state is EngineState.HALF_LOADED:
            self._move(EngineState.OPEN)

    def fail(self, why: str) -> None:
        """Note that an error ended an update in the middle. :meth:`check` raises ``why`` from now on."""
        self._move(EngineState.FAILED)
        self._failure = why

    def close(self) -> None:
        """Note that the engine is closed. :meth:`check` raises from now on."""
        self._move(EngineState.CLOSED)

    def _move(self, to: EngineState) -> None:
        assert (self.state, to) in _EDGES, f"an engine cannot go from {self.state} to {to}"
        self.state = to
        self.is_open = to is EngineState.OPEN
