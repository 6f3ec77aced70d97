"""The position of every element of a unit: in which slot, and in which rank's shard (ADR 0001).

Pure arithmetic, without tensors or process groups. Training, checkpoints, accounting and planning use the
same object, so they cannot disagree.

Letters: ``W`` ranks share the unit, ``N`` is its number of elements with padding, ``S = N // W`` is the
number of elements of one rank's shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import NamedTuple

ALIGNMENT = 64
"""Every parameter starts, and every shard ends, at a multiple of this many elements.

In 16 bit these are 128 bytes, an alignment that matrix kernels and collectives use well. It also keeps
results bit-equal between stages: a shard boundary never splits a SIMD block that the unsharded update
would compute at once.
"""


def round_up(numel: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``numel``.

    >>> round_up(65, 64), round_up(64, 64), round_up(0, 64)
    (128, 64, 0)
    """
    return -(-numel // multiple) * multiple


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """The part of a global tensor that the ranks of one shard group hold: ``global[start:][:extent]``.

    ``shape``: of the global tensor. ``start``: of this part, one number per axis; its extent is the shape
    of the slot. ``split``: the dimensions of the mesh that cut the tensor. Ranks that differ in another
    dimension hold the same part. ``largest``: elements of the largest part. Every rank leaves this room,
    so parameters have the same positions everywhere, also where a size does not divide.

    ``runs``: of a part that joins several along ``axis``, one after another: ``(begin, extent)`` of each
    in the global tensor. So a fused projection has a part of q, one of k and one of v. Empty: one part.

    ``copy``: the position of this rank among those of its tensor group that hold the same part of a
    tensor that is cut into fewer parts than there are tensor ranks.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    split: frozenset[str]
    largest: int
    axis: int = 0
    runs: tuple[tuple[int, int], ...] = ()
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Slot:
    """The position of one parameter in its unit: ``full_N[start:stop].view(shape)``.

    ``block``: the part of the global tensor that this parameter is; None: all of it.
    """

    fqn: str
    shape: tuple[int, ...]
    start: int
    block: SlotBlock | None = None
    numel: int = field(init=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", prod(self.shape))
        object.__setattr__(self, "stop", self.start + self.numel)


def is_split(slot: Slot, dim: str = "tensor") -> bool:
    """Whether ``dim`` of the mesh cuts the parameter. If not, every rank along it holds the same part."""
    return slot.block is not None and dim in slot.block.split


def is_counted(slot: Slot, place: int) -> bool:
    """Whether the tensor coordinate ``place`` counts the parameter, of those that hold the same part."""
    if slot.block is not None and "tensor" in slot.block.split:
        return slot.block.copy == 0
    return place == 0


@dataclass(frozen=True, slots=True)
class Fragment:
    """Part of a parameter in one shard: ``shard[at:][:numel] == param.flat[begin:][:numel]``."""

    fqn: str
    begin: int
    at: int
    numel: int


@dataclass(frozen=True)
class UnitLayout:
    """Slots of one unit, in order, and its padded size, which is the same on every rank.

    >>> layout = pack([("w", (10, 10)), ("b", (10,))], num_shards=2)
    >>> layout.full_numel, layout.shard_numel
    (256, 128)
    >>> list(layout.fragments(0))
    [Fragment(fqn='w', begin=0, at=0, numel=100)]
    >>> list(layout.fragments(1))
    [Fragment(fqn='b', begin=0, at=0, numel=10)]
    """

    slots: tuple[Slot, ...]
    full_numel: int  # N
    num_shards: int  # W, the ranks that share the unit

    @cached_property
    def shard_numel(self) -> int:
        """S, the same on every rank."""
        return self.full_numel // self.num_shards

    @cached_property
    def params_numel(self) -> int:
        """Elements of parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the slots are in ``full_N`` one after the other, with nothing between them.

        >>> pack([("w", (8, 8)), ("b", (10,))], num_shards=2).is_dense
        True
        >>> pack([("b", (10,)), ("w", (8, 8))], num_shards=2).is_dense
        False
        """
        stops = [0, *(slot.stop for slot in self.slots)]
        return all(slot.start == stop for slot, stop in zip(self.slots, stops, strict=False))

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """``(begin, end)`` of all padding in ``full_N``, in order.

        >>> pack([("w", (10, 10)), ("b", (10,))], num_shards=2).gaps
        ((100, 128), (138, 256))
        """
        slots = sorted(self.slots, key=lambda slot: slot.start)
        ends = [0, *(slot.stop for slot in slots)]
        starts = [*(slot.start for slot in slots), self.full_numel]
        return tuple(gap for gap in zip(ends, starts, strict=True) if gap[0] < gap[1])

    def shard_range(self, rank: int) -> tuple[int, int]:
        """``(begin, end)`` of the rank's shard in ``full_N``."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def fragments(self, rank: int) -> Iterator[Fragment]:
        """The fragments that ``rank`` owns, in shard order. Padding and empty parameters are in none."""
        return self.fragments_between(*self.shard_range(rank))

    def fragments_between(self, low: int, high: int) -> Iterator[Fragment]:
        """The parts of parameters in ``full_N[low:high]``. ``at`` is counted from ``low``."""
        for slot in self.slots:
            begin, end = max(low, slot.start), min(high, slot.stop)
            if begin < end:
                yield Fragment(slot.fqn, begin - slot.start, begin - low, end - begin)


class _Item(NamedTuple):
    fqn: str
    shape: tuple[int, ...]
    block: SlotBlock | None

    @property
    def numel(self) -> int:
        return prod(self.shape) if self.block is None else self.block.largest

    @property
    def room(self) -> int:
        return round_up(self.numel, ALIGNMENT)


def pack(
    params: Iterable[tuple[str, Sequence[int]]],
    *,
    num_shards: int,
    whole: bool = False,
    blocks: Mapping[str, SlotBlock] = MappingProxyType({}),
) -> UnitLayout:
    """Place parameters one after another, and pad so that ``num_shards`` equal shards result.

    ``whole``: never cut a parameter, because the optimizer needs whole matrices (Muon). Parameters are
    then assigned to shards, the largest first, and S is the size of the fullest shard. ``blocks``: of
    parameters that are parts of global tensors, by name.

    >>> [slot.start for slot in pack([("a", (100,)), ("b", (8, 8))], num_shards=2, whole=True).slots]
    [0, 128]
    """
    items = [_Item(fqn, tuple(shape), blocks.get(fqn)) for fqn, shape in params]
    if not whole:
        slots, end = [], 0
        for item in items:
            slots.append(Slot(item.fqn, item.shape, end, item.block))
            end += item.room
        return UnitLayout(tuple(slots), round_up(end, ALIGNMENT * num_shards), num_shards)

    shards: list[list[_Item]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for item in sorted(items, key=lambda item: -item.numel):
        rank = load.index(min(load))
        shards[rank].append(item)
        load[rank] += item.room
    shard_numel = max(load)
    slots = []
    for rank, members in enumerate(shards):
        end = rank * shard_numel
        for item in members:
            slots.append(Slot(item.fqn, item.shape, end, item.block))
            end += item.room
    return UnitLayout(tuple(slots), shard_numel * num_shards, num_shards)
