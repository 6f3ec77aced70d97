"""Which units are full at each moment of forward and backward?

The order of units is learnt in the first forward. From then on the next units are gathered ahead, in
both directions; a wrong guess costs time, never a wrong value, since every use waits for its own unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from zeroshard.zero.unit import Unit, UnitState


@dataclass(eq=False)
class WrappedModule:
    """A module and the units that its forward needs: one per dtype and trainability."""

    name: str
    module: nn.Module
    units: tuple[Unit, ...]
    numel: int = field(init=False)  # elements that are gathered for it
    running: list[Any] = field(default_factory=list)  # forward calls that have not ended, or None
    open_calls: int = 0  # forward calls that backward has not left yet
    missing_grads: int = 0  # gradients of this backward that have not arrived yet

    def __post_init__(self) -> None:
        self.numel = sum(unit.layout.full_numel for unit in self.units if not unit.resident)

    def unshard(self) -> None:
        for unit in self.units:
            unit.unshard()

    def prefetch_shards(self) -> None:
        """Read shards that rest on disk ahead of their gather: it is rank-local and takes longest."""
        for unit in self.units:
            unit.store.prefetch()

    def wait_for_unshard(self) -> None:
        for unit in self.units:
            unit.unshard()
        for unit in self.units:
            unit.wait_for_unshard()

    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()

    @property
    def is_read_in_backward(self) -> bool:
        """An embedding's backward scatters into its gradient and never reads the table."""
        module = self.module
        # One forward hook is ours; what others of the program's compute is not known.
        return type(module) is not nn.Embedding or len(module._forward_hooks) > 1

    @property
    def is_sharded(self) -> bool:
        return any(unit.state is UnitState.SHARDED for unit in self.units)


class Prefetcher:
    """Unshards sites before their use, some ahead, and reshards them after.

    ``prefetch_numel``: elements gathered ahead of their use (``stage3_prefetch_bucket_size``).
    ``live_numel``: nothing is gathered ahead or kept beyond this many full elements
    (``stage3_max_live_parameters``). ``reuse_numel``: a site stays full after forward if no more than
    this many elements are used until its backward (``stage3_max_reuse_distance``); None keeps the
    last one, which would be gathered twice in a row otherwise, 0 keeps none.
    """

    def __init__(
        self,
        wrapped_modules: Sequence[WrappedModule],
        *,
        prefetch_numel: int,
        live_numel: int,
        reuse_numel: int | None = None,
    ) -> None:
        self.reuse_numel = reuse_numel
        self._kept: frozenset[int] = frozenset()
        self.wrapped_modules = list(wrapped_modules)
        self.root = self.wrapped_modules[-1]
        self.prefetch_numel = prefetch_numel
        self.live_numel = live_numel
        self._is_limited = sum(wrapped.numel for wrapped in self.wrapped_modules) > live_numel
        self.order: list[WrappedModule] = []  # of the last complete forward
        self._position: dict[int, int] = {}
        self._recording: list[WrappedModule] = []
        self._seen: set[int] = set()

    def begin_forward(self) -> None:
        """Start of the root's forward: whatever an abandoned step left full is freed."""
        self._recording, self._seen = [], set()
        self.reshard_all(but=self.root)
        self.unshard(self.root, forward=True)

    def end_forward(self) -> None:
        """End of the root's forward: adopt the recorded order, drop what was gathered for nothing."""
        if [id(s) for s in self._recording] != [id(s) for s in self.order]:
            self.order = self._recording
            self._position = {id(wrapped): i for i, wrapped in enumerate(self.order)}
            self._kept = frozenset(id(wrapped) for wrapped in self._worth_keeping())
        self._recording = []

    def unshard(self, wrapped: WrappedModule, *, forward: bool, reads: bool = True) -> None:
        """The site is about to be used, and its parameters if it ``reads`` them.

        ``forward``: the pass that is running; a recomputed forward belongs to backward.
        """
        if forward and id(wrapped) not in self._seen and wrapped is not self.root:
            self._seen.add(id(wrapped))
            self._recording.append(wrapped)
        if reads:
            wrapped.unshard()
        self._prefetch(wrapped, forward)
        if reads:
            wrapped.wait_for_unshard()

    @property
    def keeps_root(self) -> bool:
        """Does the root stay full between forward and backward?"""
        return self.reuse_numel != 0

    def keeps_for_backward(self, wrapped: WrappedModule) -> bool:
        """Would freeing the site after its forward cost more than it frees?"""
        return id(wrapped) in self._kept

    def _worth_keeping(self) -> Iterator[WrappedModule]:
        """Of the order of forward, from its end: what backward uses soon, as far as memory allows."""
        live, distance = self.root.numel, 0
        for wrapped in reversed(self.order):
            live += wrapped.numel
            if self.reuse_numel is None:
                if distance:
                    return
            elif live > self.live_numel or distance > self.reuse_numel or not self.reuse_numel:
                return
            yield wrapped
            distance += 2 * wrapped.numel

    def reshard_all(self, but: WrappedModule | None = None) -> None:
        """Free every sharded unit that is full."""
        for wrapped in self.wrapped_modules:
            if wrapped is not but:
                wrapped.reshard()
                for unit in wrapped.units:
                    unit.store.cancel_prefetch()

    def _prefetch(self, wrapped: WrappedModule, forward: bool) -> None:
        at = self._position.get(id(wrapped))
        if at is None:
            return
        ahead = self.order[at + 1 :] if forward else reversed(self.order[:at])
        budget, started = self.prefetch_numel, False
        if self._is_limited:
            budget = min(budget, self.live_numel - self.live())
        for later in ahead:
            budget -= later.numel
            if budget < 0:
                return
            if later.is_sharded and (forward or later.is_read_in_backward):
                if started:
                    later.prefetch_shards()
                    return
                later.unshard()  # one gather ahead of the compute: enough to hide it, bounded in memory
                started = True

    def live(self) -> int:
        """Elements of sharded units that are full or on their way."""
        return sum(
            unit.layout.full_numel
            for wrapped in self.wrapped_modules
            for unit in wrapped.units
            if not unit.resident and unit.state is not UnitState.SHARDED
        )
