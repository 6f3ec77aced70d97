"""The slots of a unit whose gradients are added over the tensor group: see [Note: addends].

[Note: addends] A parameter that no dimension cuts has a copy in every tensor rank. If each rank's layer
sees only a part of the tokens or heads, as a norm does under sequence parallelism, each rank's gradient
is an *addend*, and the gradient is their sum. Key/value heads that are fewer than tensor ranks have
copies in a part of the tensor group, and each rank's gradient comes from its own query heads.

Addends are collected like other gradients: they are summed over micro-batches and reduced over the
holders. Then each rank has the sum of its own addends in its shard, and the shards of a tensor group have
the same fragments. One message between the ranks that hold the same parts completes them
(:class:`~zeroshard.zero.copy_sums.CopySums`), whatever the number of micro-batches and of parameters.

*Which slots.* The ranks of a tensor group and all holders must agree on it. Layers that ZeroShard has
cut say it (:func:`~zeroshard.comm.dtensors.mark_addends`). Of other DTensors it is not known before
their first gradient. In the first step their addends are added when they arrive, by one all-reduce
each. At its end the holders exchange which parameters these were: one small message in the life of the
engine.

*A gradient that is whole* may arrive in such a slot, for instance if a program uses the parameter in
another way too. Then the first rank of those with the same part alone counts it. An addend in any other
slot is added when it arrives. So sums are right whatever arrives.

*Hooks of the program* may add the gradient of a plain parameter over the group by themselves, as those of
gpt-neox do. That takes all ranks. So a gradient that has hooks on all of them is taken for whole, and one
that has hooks on some, which look at it, is not. The message says which have. If such a gradient was no
sum, its copies differ, which the exchange of norms finds.

Letters: as in :mod:`zeroshard.zero.unit`; K elements in the fragments of one shard.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.dtensors import is_addend, local_grad
from zeroshard.core.layout import UnitLayout


class AddendSlots:
    """The slots of one unit whose gradients are addends.

    ``known``: for each slot that may be one, whether it is; None: its first gradient will tell.
    ``plain``: slots of plain parameters, in a layer that the program has cut.
    ``counts``: this rank counts gradients that are whole. ``shard``: begin and end of this rank's shard
    in the unit.
    """

    def __init__(
        self,
        known: Mapping[int, bool | None],
        layout: UnitLayout,
        shard: tuple[int, int],
        *,
        counts: bool,
        plain: Sequence[int] = (),
    ) -> None:
        self.known = dict(known)
        self.counts = counts
        self.plain = tuple(plain)
        self.hooked: set[int] = set()  # slots of ``plain`` with hooks of the program in this step
        self.whole: Tensor | None = None  # by slot of ``plain``: has hooks on all ranks
        self.is_summed = False  # the reduced gradient has the sums over the tensor group
        self.seen: set[int] = set()  # slots of unknown kind that got an addend
        self.kept_K: Tensor | None = None  # the fragments of a gradient that is in its store
        self._layout, self._shard = layout, shard
        self._places: list[tuple[int, int]] = []
        self._slots: list[int] = []  # of the places
        self._place()

    def _place(self) -> None:
        low, high = self._shard
        self._places, self._slots = [], []
        for index in sorted(index for index, adds in self.known.items() if adds):
            slot = self._layout.slots[index]
            begin, end = max(low, slot.start), min(high, slot.stop)
            if begin < end:
                self._places.append((begin - low, end - low))
                self._slots.append(index)

    @property
    def numel(self) -> int:
        """K. The same on all ranks of a tensor group."""
        return sum(end - begin for begin, end in self._places)

    def learn(self, indices: Iterable[int]) -> None:
        """Know now that the slots of unknown kind are addends if they are among ``indices``."""
        found = set(indices)
        for index, adds in self.known.items():
            if adds is None:
                self.known[index] = index in found
        self._place()

    def note_hook(self, index: int) -> None:
        """Note that the program has a hook on the gradient of a slot."""
        if index in self.plain:
            self.hooked.add(index)

    def mask(self, flags: Tensor) -> list[Tensor]:
        """For all elements of each fragment, the flag of its slot. ``flags``: as :attr:`whole`."""
        at = {index: place for place, index in enumerate(self.plain)}
        lengths = [end - begin for begin, end in self._places]
        none = torch.zeros((), dtype=torch.bool, device=flags.device)
        return [
            (flags[at[index]] if index in at else none).expand(numel)
            for index, numel in zip(self._slots, lengths, strict=True)
        ]

    def local(self, index: int, param: Any, grad: Any) -> Tensor:
        """What this rank adds to the slot for a DTensor gradient of its parameter."""
        adds = self.known.get(index)
        if adds and is_addend(param, grad):
            values: Tensor = grad._local_tensor
            return values
        if adds is None and index in self.known and is_addend(param, grad):
            self.seen.add(index)
        values = local_grad(param, grad)
        return self.counted(index, values)

    def counted(self, index: int, values: Tensor) -> Tensor:
        """``values`` of a gradient that is whole, or zeros if another rank counts it."""
        if self.counts or self.is_summed or not self.known.get(index):
            return values
        return torch.zeros_like(values)

    def parts(self, values_S: Tensor, but: Collection[int] = ()) -> list[Tensor]:
        """Views of the fragments in a reduced gradient, without those of the slots ``but``."""
        places = zip(self._slots, self._places, strict=True)
        return [values_S[begin:end] for index, (begin, end) in places if index not in but]

    def keep(self, values_S: Tensor) -> None:
        """Copy the fragments of a gradient that is moved to its store."""
        self.kept_K = torch.cat(self.parts(values_S)) if self._places else None

    def reset(self) -> None:
        """Begin a new step."""
        self.is_summed, self.kept_K, self.whole = False, None, None
        self.hooked.clear()
