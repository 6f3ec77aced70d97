"""Lists which named tensors a model has, and which pieces of them this rank holds.

Saving, loading and digests use the same list in the same order: units in the order of the model, then
chunks. A chunk's values come before its state. Chunks on disk have memory only while they are visited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.boxes import Box, Strip, positions, strides
from zeroshard.checkpoint.manifest import VALUE, dtype_name
from zeroshard.core.layout import Slot
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.unit import Unit

_DIGEST_WORDS = 1 << 20  # 8-byte words at a time: 8 MiB, and as much for their weights


@dataclass(frozen=True, eq=False, slots=True)
class ShardItem:
    """``flat[begin : begin + numel]`` of a named tensor. It is ``holder.flat[at : at + numel]`` here.

    ``box``: ``flat`` is that of this box of the global tensor, in row-major order, and ``shape`` is that
    of the global tensor. None: it is the whole tensor. ``strip``: the box is one of several that the slot
    joins, and ``holder.flat[at]`` is element ``origin`` of the slot.
    """

    fqn: str
    tensor: str
    begin: int
    numel: int
    holder: Tensor
    at: int
    box: Box | None = None
    shape: tuple[int, ...] = ()
    strip: Strip | None = None
    origin: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return self.holder.dtype

    @property
    def values(self) -> Tensor:
        """1-D ``[numel]``. Valid while the item is visited: outside of that the holder may be empty.

        A copy, if the elements do not lie side by side.
        """
        flat = self.holder.view(-1)
        if self.strip is None:
            return flat[self.at : self.at + self.numel]
        end = self.begin + self.numel
        views = self.strip.views(flat[self.at :], self.origin, self.begin, end)
        if len(views) == 1 and views[0].is_contiguous():
            return views[0].view(-1)
        return torch.cat([view.reshape(-1) for view in views])


@dataclass(frozen=True, eq=False, slots=True)
class LocalState:
    """What one engine holds on this rank. ``optimizer.shards``: one for each trained unit.

    ``counts``: whether this rank saves its part of a parameter. Where several shard groups hold the same
    part (replicas, or a parameter that tensor parallelism does not split), it is true in one of them.
    """

    units: Sequence[Unit]
    optimizer: ShardedOptimizer | None
    counts: Callable[[Slot], bool] = lambda _slot: True
    _shards: dict[Unit, OptimizerShard] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shards = self.optimizer.shards if self.optimizer is not None else []
        object.__setattr__(self, "_shards", {shard.unit: shard for shard in shards})

    def shard_of(self, unit: Unit) -> OptimizerShard | None:
        """The unit's optimizer shard. None: the unit is frozen, or there is no optimizer."""
        return self._shards.get(unit)

    def pieces(self, unit: Unit) -> list[ShardItem]:
        """What this rank saves of a unit. Each element is saved by exactly one rank.

        Values may have no memory; :meth:`visit` loads them.
        """
        shard = self.shard_of(unit)
        if shard is None:
            return self._plain_pieces(unit)
        return [piece for chunk in shard.chunks for piece in self.chunk_pieces(shard, chunk)]

    def visit(self, unit: Unit) -> Iterator[ShardItem]:
        """The items of :meth:`pieces`, each readable until the next one.

        Edits of the program are taken over before the values are read.
        """
        unit.wait_for_unshard()
        unit.write_back_edits()
        shard = self.shard_of(unit)
        if shard is None:
            unit.store.acquire()
            try:
                yield from self._plain_pieces(unit)
            finally:
                unit.store.release()
            return
        for chunk in shard.visit():
            chunk.sync_edits()
            yield from self.chunk_pieces(shard, chunk)

    def chunk_pieces(self, shard: OptimizerShard, chunk: OptimizerChunk) -> list[ShardItem]:
        """What this rank saves of a chunk: masters, then each kind of state in turn."""
        assert self.optimizer is not None
        low, high = shard.own
        found: list[ShardItem] = []
        for name in [VALUE, *_shaped(self.optimizer, chunk.fragments)]:
            for fragment in chunk.fragments:
                at = chunk.begin + fragment.at
                skip, stop = max(0, low - at), min(fragment.numel, high - at)
                flat = fragment.master if name == VALUE else None
                if flat is None:
                    flat = self.optimizer.state_of(fragment).get(name)
                slot = slot_of(shard.unit, fragment)
                if skip < stop and isinstance(flat, Tensor) and self.counts(slot):
                    begin = fragment.begin + skip
                    found += _items(slot, name, begin, stop - skip, flat, skip)
        return found

    def _plain_pieces(self, unit: Unit) -> list[ShardItem]:
        slots = {slot.fqn: slot for slot in unit.layout.slots}
        return [
            item
            for part in unit.layout.fragments(unit.comm.rank)
            if self.counts(slots[part.fqn])
            for item in _items(
                slots[part.fqn], VALUE, part.begin, part.numel, unit.shard_S, part.at
            )
        ]

    def descriptions(self, aliases: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """What the manifest says about the parameters that this rank describes, as JSON values, by name.

        The first rank of a shard group describes them, whether or not it saves them: so a parameter that
        no rank saves is noticed. ``dtype``: of the values.
        """
        return {
            slot.fqn: {
                "shape": list(global_shape(slot)),
                "trained": unit.trainable,
                "dtype": dtype_name(
                    unit.row.param if self.shard_of(unit) is None else unit.row.master,
                    where=slot.fqn,
                ),
                "aliases": list(aliases.get(slot.fqn, ())),
            }
            for unit in self.units
            if unit.comm.rank == 0
            for slot in unit.layout.slots
        }

    def scalars(self, unit: Unit) -> dict[str, dict[str, object]]:
        """By parameter, the optimizer's single numbers: 0-dim tensors and Python numbers."""
        found: dict[str, dict[str, object]] = {}
        shard = self.shard_of(unit)
        if shard is None or self.optimizer is None:
            return found
        for fragment in shard.fragments:
            state = self.optimizer.state_of(fragment)
            numbers = {k: v for k, v in state.items() if not is_shaped(k, v, fragment)}
            if numbers:
                found.setdefault(slot_of(unit, fragment).fqn, {}).update(numbers)
        return found

    def groups(self, unit: Unit) -> dict[str, int]:
        """By parameter, the index of its param group."""
        shard = self.shard_of(unit)
        fragments = shard.fragments if shard is not None else ()
        return {slot_of(unit, fragment).fqn: fragment.group for fragment in fragments}


def slot_of(unit: Unit, fragment: OwnedFragment) -> Slot:
    """The slot of the parameter that a fragment belongs to."""
    return unit.layout.slots[fragment.index]


def global_shape(slot: Slot) -> tuple[int, ...]:
    """The shape of the whole parameter, of which the slot may be a box."""
    return slot.shape if slot.block is None else slot.block.shape


def ranges_of(
    slot: Slot, begin: int, end: int
) -> Iterator[tuple[Box | None, int, int, Strip | None]]:
    """``(box, low, high, strip)``: elements ``begin`` to ``end`` of a slot as elements of boxes.

    ``box``: None for the whole tensor. ``strip``: where the box's elements lie in the slot, if it joins
    several boxes.
    """
    if slot.block is None or slot.shape == slot.block.shape:
        yield None, begin, end, None
    elif not slot.block.runs:
        yield Box(slot.block.start, slot.shape), begin, end, None
    else:
        for strip in _strips(slot):
            low, high = strip.count(begin), strip.count(end)
            if low < high:
                yield strip.box, low, high, strip


def _strips(slot: Slot) -> Iterator[Strip]:
    block = slot.block
    assert block is not None
    inner = strides(slot.shape)[block.axis]
    at = 0
    for begin, extent in block.runs:
        start, size = list(block.start), list(slot.shape)
        start[block.axis], size[block.axis] = begin, extent
        box = Box(tuple(start), tuple(size))
        yield Strip(box, at, extent * inner, slot.shape[block.axis] * inner)
        at += extent * inner


def _items(
    slot: Slot, tensor: str, begin: int, numel: int, holder: Tensor, at: int
) -> Iterator[ShardItem]:
    shape = global_shape(slot)
    for box, low, high, strip in ranges_of(slot, begin, begin + numel):
        yield ShardItem(slot.fqn, tensor, low, high - low, holder, at, box, shape, strip, begin)


def is_shaped(name: str, value: object, fragment: OwnedFragment) -> bool:
    """Whether this state has the parameter's shape and is cut like the parameter. ``step`` never is."""
    return isinstance(value, Tensor) and value.shape == fragment.shape and name != "step"


def _shaped(optimizer: ShardedOptimizer, fragments: Iterable[OwnedFragment]) -> list[str]:
    names: dict[str, None] = {}
    for fragment in fragments:
        for name, value in optimizer.state_of(fragment).items():
            if is_shaped(name, value, fragment):
                names[name] = None
    return list(names)


def digest_part(piece: ShardItem) -> int:
    """What an item adds to the digest of its tensor.

    The sum over any cut of the tensor is the same, modulo 2**64.

    The bytes, padded with zeros, are read as little-endian 8-byte words. Word ``i`` of the tensor is
    multiplied by ``((i + 1) * 0x9E3779B97F4A7C15) | 1``. Waits for the device.
    """
    if piece.box is not None:
        return _scattered_digest(piece, piece.box)
    begin_nbytes = piece.begin * piece.dtype.itemsize
    assert begin_nbytes % 8 == 0, "shards are cut at multiples of 64 elements"
    raw = piece.values.contiguous().view(torch.uint8)
    total = 0
    for part in raw.split(8 * _DIGEST_WORDS):
        words = torch.nn.functional.pad(part, (0, -part.numel() % 8)).clone().view(torch.int64)
        first = begin_nbytes // 8 + 1
        places = torch.arange(first, first + words.numel(), device=words.device)
        total += int((words * (places * _ODD | 1)).sum())
        begin_nbytes += part.numel()
    return total % 2**64


def _scattered_digest(piece: ShardItem, box: Box) -> int:
    """:func:`digest_part` of elements that do not lie side by side in the whole tensor.

    An element is a part of one word, and the digest is linear in the words. So each element adds its
    bits, moved to their place in the word, times the word's factor.
    """
    itemsize = piece.dtype.itemsize
    flat = piece.values.contiguous()
    bits_of = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    width = min(itemsize, 8)  # complex128 has two words
    mask = -1 if width == 8 else (1 << 8 * width) - 1
    total, begin = 0, piece.begin
    for part in flat.split(_DIGEST_WORDS):
        end = begin + part.numel()
        nbytes = positions(piece.shape, box, begin, end, part.device) * itemsize
        if width < itemsize:
            nbytes = torch.stack([nbytes, nbytes + width], dim=1).view(-1)
        bits = (part.view(bits_of[width]).long() & mask) << (nbytes % 8 * 8)
        total += int((bits * ((nbytes // 8 + 1) * _ODD | 1)).sum())
        begin = end
    return total % 2**64


def total_digests(parts: Iterable[Mapping[str, int]]) -> dict[str, str]:
    """The digests of whole tensors by name, from the ranks' sums of :func:`digest_part`."""
    totals: dict[str, int] = {}
    for part in parts:
        for fqn, sum_ in part.items():
            totals[fqn] = (totals.get(fqn, 0) + sum_) % 2**64
    return {fqn: f"{total:016x}" for fqn, total in totals.items()}


_ODD = 0x9E3779B97F4A7C15 - 2**64  # as a signed 64-bit word


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The entries of ``module.state_dict()`` that are no parameters. Does not read parameters."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }


def state_names(module: nn.Module) -> Iterator[str]:
    """The names of parameters and buffers in the order of ``module.state_dict()``, and of those that it
    leaves out."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for name in (*owner._parameters, *owner._buffers):
            yield f"{prefix}.{name}" if prefix else name


def other_names(module: nn.Module) -> dict[str, list[str]]:
    """First name of a tied parameter -> its other names."""
    first = {id(param): name for name, param in module.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first[id(param)] != name:
            found.setdefault(first[id(param)], []).append(name)
    return found
