"""Makes what stores state in one tier: memory for shards, stores, and memory for chunks.

:class:`TierStores` is the tier of memory that is always there. A new tier is a subclass that overrides
what is different, and a row of :data:`zeroshard.core.tiers.TIERS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.config.zero_section import OffloadOptimizerConfig, OffloadParamConfig
from zeroshard.core.ledger import Ledger
from zeroshard.core.tiers import Tier
from zeroshard.device.copy_streams import CopyStreams
from zeroshard.device.pinned import HostArena, slot_nbytes
from zeroshard.offload.grad_store import GradStore
from zeroshard.offload.shard_store import EditWatch, HostShardStore, ShardStore

if TYPE_CHECKING:
    from zeroshard.comm.collectives import Comm, Handle
    from zeroshard.offload.pager import Page, Pager
    from zeroshard.offload.swap_file import SwapFile


@dataclass(frozen=True, eq=False, slots=True)
class TierOpening:
    """What the stores of a tier are made from. The sections are None if the configuration has none.

    ``streams``: copies between host memory and the device; None if they are one memory. ``watched`` gets
    those of shards that are not on the device. ``is_planned``: tensors are fake, so there is no file.
    """

    tier: Tier
    device: torch.device
    ledger: Ledger
    optimizer: OffloadOptimizerConfig | None
    param: OffloadParamConfig | None
    streams: CopyStreams | None = None
    watched: list[EditWatch] = field(default_factory=list)
    is_planned: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class ChunkMemory:
    """Memory for the master and the state of one chunk: flat tensors by name. The master has name "".

    ``page``: the tensors are valid only while it is open; None: always.
    """

    views: dict[str, Tensor]
    page: Page | None = None


class TierStores:
    """The stores of one tier on this rank. These methods serve memory that is always there.

    A tier with ``only_in_use`` overrides all methods; :meth:`open_pager` is called before the first chunk
    is made.
    """

    def __init__(self, opening: TierOpening) -> None:
        self._opening = opening
        self.tier = opening.tier
        self.arenas: list[HostArena] = []  # the page-locked memory

    @property
    def files(self) -> list[SwapFile]:
        """The swap files that are open."""
        return []

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeroed memory ``[numel]`` for a shard."""
        return torch.zeros(numel, dtype=dtype, device=self._opening.device)

    def shard_store(self, unit: str, shard_S: Tensor) -> ShardStore:
        """The store of a unit's shard, which has its first values."""
        return ShardStore(shard_S, self.tier)

    def grad_store(self, unit: str, nbytes: int) -> GradStore | None:
        """The store of a unit's reduced gradient of ``nbytes``; None: it stays in its buffer."""

    def chunk_memory(self, numel: int, dtypes: Mapping[str, torch.dtype]) -> ChunkMemory | None:
        """Memory for flat tensors ``[numel]`` of one chunk: master and state of the parameter's shape.

        None: the master is allocated with torch, and state stays where the optimizer allocates it.
        """

    def open_pager(self, pages_nbytes: Sequence[int]) -> Pager | None:
        """The pager for pages of at most these bytes, in order. None: chunks have no pages."""

    def close(self) -> None:
        """Free memory and disk space."""


class HostStores(TierStores):
    """Host memory. On a GPU host a shard is pinned, since it is copied to the GPU for each use."""

    def shard_store(self, unit: str, shard_S: Tensor) -> ShardStore:
        streams = self._opening.streams
        if streams is None:
            return super().shard_store(unit, shard_S)
        store = HostShardStore(shard_S, streams, tier=self.tier, name=unit)
        self._opening.watched.append(store.watch)
        return store

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        if self._opening.device.type == "cpu":
            return super().allocate(numel, dtype)
        section = self._opening.param
        arena = HostArena(slot_nbytes(numel, dtype), section is not None and section.pin_memory)
        self.arenas.append(arena)
        return arena.take(numel, dtype)


class _FakeShardStore(ShardStore):
    def all_gather(self, comm: Comm, full_N: Tensor, part_S: Tensor, *, name: str) -> Handle:
        return comm.all_gather(full_N, self.shard_S.to(full_N.device), name=name)


class FakeStores(TierStores):
    """Host memory under fake tensors, for a rank that may have a GPU."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def shard_store(self, unit: str, shard_S: Tensor) -> ShardStore:
        return _FakeShardStore(shard_S, self.tier)
