"""Lists which named tensors a model has, and which pieces of them this rank holds.

Saving, loading and digests use the same list in the same order: units in the order of the model, then
chunks. A chunk's values come before its state. Chunks on disk have memory only while they are visited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.manifest import VALUE
from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.unit import Unit

_DIGEST_WORDS = 1 << 20  # 8-byte words at a time: 8 MiB, and as much for their weights


@dataclass(frozen=True, eq=False, slots=True)
class ShardItem:
    """``flat[begin : begin + numel]`` of a named tensor. It is ``holder.flat[at : at + numel]`` here."""

    fqn: str
    tensor: str
    begin: int
    numel: int
    holder: Tensor
    at: int

    @property
    def dtype(self) -> torch.dtype:
        return self.holder.dtype

    @property
    def values(self) -> Tensor:
        """1-D ``[numel]``. Valid while the item is visited: outside of that the holder may be empty."""
        return self.holder.view(-1)[self.at : self.at + self.numel]


@dataclass(frozen=True, eq=False, slots=True)
class LocalState:
    """What one engine holds on this rank. ``optimizer.shards``: one for each trained unit."""

    units: Sequence[Unit]
    optimizer: ShardedOptimizer | None
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
            return _plain_pieces(unit)
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
                yield from _plain_pieces(unit)
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
                flat = fragment.value if name == VALUE else None
                if flat is None:
                    flat = self.optimizer.inner.state.get(fragment.value, {}).get(name)
                if skip < stop and isinstance(flat, Tensor):
                    fqn, begin = fqn_of(shard.unit, fragment), fragment.begin + skip
                    found.append(ShardItem(fqn, name, begin, stop - skip, flat, skip))
        return found

    def scalars(self, unit: Unit) -> dict[str, dict[str, object]]:
        """By parameter, the optimizer's single numbers: 0-dim tensors and Python numbers."""
        found: dict[str, dict[str, object]] = {}
        shard = self.shard_of(unit)
        if shard is None or self.optimizer is None:
            return found
        for fragment in shard.fragments:
            state = self.optimizer.inner.state.get(fragment.value, {})
            numbers = {k: v for k, v in state.items() if not is_shaped(k, v, fragment)}
            if numbers:
                found.setdefault(fqn_of(unit, fragment), {}).update(numbers)
        return found

    def groups(self, unit: Unit) -> dict[str, int]:
        """By parameter, the index of its param group."""
        shard = self.shard_of(unit)
        fragments = shard.fragments if shard is not None else ()
        return {fqn_of(unit, fragment): fragment.group for fragment in fragments}


def fqn_of(unit: Unit, fragment: OwnedFragment) -> str:
    """The name of the parameter that a fragment belongs to."""
    return unit.layout.slots[fragment.index].fqn


def is_shaped(name: str, value: object, fragment: OwnedFragment) -> bool:
    """Whether this state has the parameter's shape and is cut like the parameter. ``step`` never is."""
    return isinstance(value, Tensor) and value.shape == fragment.value.shape and name != "step"


def _shaped(optimizer: ShardedOptimizer, fragments: Iterable[OwnedFragment]) -> list[str]:
    names: dict[str, None] = {}
    for fragment in fragments:
        for name, value in optimizer.inner.state.get(fragment.value, {}).items():
            if is_shaped(name, value, fragment):
                names[name] = None
    return list(names)


def _plain_pieces(unit: Unit) -> list[ShardItem]:
    return [
        ShardItem(part.fqn, VALUE, part.begin, part.numel, unit.shard_S, part.at)
        for part in unit.layout.fragments(unit.comm.rank)
    ]


def digest_part(piece: ShardItem) -> int:
    """What an item adds to the digest of its tensor.

    The sum over any cut of the tensor is the same, modulo 2**64.

    The bytes, padded with zeros, are read as little-endian 8-byte words. Word ``i`` of the tensor is
    multiplied by ``((i + 1) * 0x9E3779B97F4A7C15) | 1``. Waits for the device.
    """
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


def other_names(module: nn.Module) -> dict[str, list[str]]:
    """First name of a tied parameter -> its other names."""
    first = {id(param): name for name, param in module.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        if first[id(param)] != name:
            found.setdefault(first[id(param)], []).append(name)
    return found
