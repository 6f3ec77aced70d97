"""Where does each element of a unit live?

Pure arithmetic, without tensors or process groups: training, checkpoints, accounting and planning use
the same object, so that they cannot disagree.

Letters: ``W`` ranks that share the unit, ``N`` padded elements of the unit, ``S = N // W`` elements of
one rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

ALIGNMENT = 64
"""Every parameter starts, and every shard ends, at a multiple of this many elements.

128 bytes in 16 bit: what matrix kernels and collectives like. It also keeps results bit-equal between
stages: a shard boundary never splits a SIMD block that the unsharded update would do at once.
"""


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``.

    >>> round_up(65, 64), round_up(64, 64), round_up(0, 64)
    (128, 64, 0)
    """
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter in its unit: ``full_N[start:stop].view(shape)``."""

    fqn: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a parameter in one shard: ``shard[at:][:numel] == param.flat[begin:][:numel]``."""

    fqn: str
    begin: int
    at: int
    numel: int


@dataclass(frozen=True)
class UnitLayout:
    """Slots of one unit, in order, and the padded size that every rank of the group shares.

    >>> layout = pack([("w", (10, 10)), ("b", (10,))], world_size=2)
    >>> layout.full_numel, layout.shard_numel
    (256, 128)
    >>> list(layout.fragments(0))
    [Fragment(fqn='w', begin=0, at=0, numel=100)]
    >>> list(layout.fragments(1))
    [Fragment(fqn='b', begin=0, at=0, numel=10)]
    """

    slots: tuple[Slot, ...]
    full_numel: int  # N
    world_size: int  # W

    @property
    def shard_numel(self) -> int:
        """S, the same on every rank."""
        return self.full_numel // self.world_size

    @cached_property
    def params_numel(self) -> int:
        """Elements of real parameters, padding excluded."""
        return sum(slot.numel for slot in self.slots)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``(begin, end)`` of the rank's shard in ``full_N``."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """What ``rank`` owns, in shard order. Padding is owned by nobody, empty parameters too."""
        return self.fragments_between(*self.shard_range(rank))

    def fragments_between(self, low: int, high: int) -> Iterator[Fragment]:
        """The parts of parameters inside ``full_N[low:high]``; ``at`` counts from ``low``."""
        for slot in self.slots:
            begin, end = max(low, slot.start), min(high, slot.stop)
            if begin < end:
                yield Fragment(slot.fqn, begin - slot.start, begin - low, end - begin)


def pack(
    params: Iterable[tuple[str, Sequence[int]]], *, world_size: int, whole: bool = False
) -> UnitLayout:
    """Lay parameters one after the other and pad so that the unit divides by ``world_size``.

    ``whole`` never cuts a parameter: some optimizers need the whole matrix (Muon). Parameters are then
    dealt to the shards, largest first, and S is the fullest shard.

    >>> [slot.start for slot in pack([("a", (100,)), ("b", (8, 8))], world_size=2, whole=True).slots]
    [0, 128]
    """
    items = [(fqn, tuple(shape)) for fqn, shape in params]
    if not whole:
        slots, end = [], 0
        for fqn, shape in items:
            slots.append(Slot(fqn, shape, end))
            end = round_up(end + prod(shape), ALIGNMENT)
        return UnitLayout(tuple(slots), round_up(end, ALIGNMENT * world_size), world_size)

    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(world_size)]
    load = [0] * world_size
    for fqn, shape in sorted(items, key=lambda item: -prod(item[1])):
        rank = load.index(min(load))
        shards[rank].append((fqn, shape))
        load[rank] += round_up(prod(shape), ALIGNMENT)
    shard_numel = max(load)
    slots = []
    for rank, members in enumerate(shards):
        end = rank * shard_numel
        for fqn, shape in members:
            slots.append(Slot(fqn, shape, end))
            end += round_up(prod(shape), ALIGNMENT)
    return UnitLayout(tuple(slots), shard_numel * world_size, world_size)
