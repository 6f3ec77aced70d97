"""Makes an optimizer shard: cuts it into chunks, and gives these masters, memory and fragments.

See [Note: what a rank updates] in ``zero/optimizer_shard.py``, also for the letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zeroshard.core.layout import Fragment
from zeroshard.core.tiers import Span, Tier
from zeroshard.offload.host_chunk import HostStaging
from zeroshard.offload.pager import page_nbytes
from zeroshard.offload.tier_stores import ChunkMemory
from zeroshard.precision.policy import DtypeRow
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.optimizer_shard import OptimizerChunk, OptimizerShard, OwnedFragment
from zeroshard.zero.unit import Unit

if TYPE_CHECKING:
    from zeroshard.offload.pager import Page, Pager

StateDtypes = Callable[[int], Mapping[str, torch.dtype]]
"""Maps the index of a param group to the optimizer state of the parameter's shape: dtype by name."""

GiveMemory = Callable[[Tier, int, Mapping[str, torch.dtype]], ChunkMemory | None]
"""``(tier, numel, dtypes)``: memory for the flat tensors of a chunk. None: the tier gives none."""


def make_optimizer_shard(
    buffer: GradBuffer,
    group_of: Mapping[int, int],
    spans: Sequence[Span],
    *,
    whole: bool,
    pager: Pager | None,
    chunk_memory: GiveMemory,
    state_dtypes: StateDtypes,
    host: HostStaging | None,
) -> OptimizerShard:
    """Cut what this rank updates of ``buffer``'s unit into chunks, and make their masters.

    ``spans``: positions and tiers of the chunks; empty: one chunk on the device. ``whole``: every rank
    updates the whole unit (stage 0). ``group_of``: index of the param group, by ``id(param)``.
    """
    unit, layout = buffer.unit, buffer.unit.layout
    low, high = layout.shard_range(unit.comm.rank)
    if whole:
        param_R, begin, end, own = unit.full_N, 0, layout.full_numel, (low, high)
    else:
        param_R, begin, end, own = unit.shard_S, low, high, (0, high - low)
    index_of = {slot.fqn: i for i, slot in enumerate(layout.slots)}
    owned = tuple(
        (index_of[piece.fqn], piece.at, piece.numel)
        for piece in layout.fragments_between(begin, end)
    )
    shard = OptimizerShard(unit, buffer, param_R, whole, own, owned, (), pager)
    with shard.loaded():
        shard.chunks = tuple(
            _make_chunk(
                shard,
                begin,
                span,
                group_of,
                chunk_memory=chunk_memory,
                state_dtypes=state_dtypes,
                host=host,
            )
            for span in spans or (Span(0, end - begin, Tier.DEVICE),)
        )
    return shard


def _make_chunk(
    shard: OptimizerShard,
    shard_begin: int,
    span: Span,
    group_of: Mapping[int, int],
    *,
    chunk_memory: GiveMemory,
    state_dtypes: StateDtypes,
    host: HostStaging | None,
) -> OptimizerChunk:
    unit, layout = shard.unit, shard.unit.layout
    whole = span.begin == 0 and span.end == shard.param_R.numel()
    param_C = shard.param_R if whole else shard.param_R[span.begin : span.end]
    index_of = {slot.fqn: i for i, slot in enumerate(layout.slots)}
    pieces = list(layout.fragments_between(shard_begin + span.begin, shard_begin + span.end))
    groups = {group_of[id(unit.params[index_of[piece.fqn]])] for piece in pieces}
    host_chunk = None
    if host is not None and span.tier is not Tier.DEVICE:
        on_host = unit.store.tier is not Tier.DEVICE
        host_chunk = host.make_chunk(param_C, on_host=on_host, shares=span.tier.only_in_use)
    near_C = param_C if host_chunk is None else host_chunk.host_param_C
    memory = chunk_memory(span.tier, param_C.numel(), _dtypes(unit.row, groups, state_dtypes))
    page, state_C = (None, {}) if memory is None else (memory.page, dict(memory.views))
    master_C = state_C.pop("", near_C)
    if unit.row.has_master and memory is not None:
        _fill_master(shard, page, master_C, near_C)
    elif unit.row.has_master:
        master_C = _copy_of(near_C, unit.row.master, None if host_chunk is None else host)
    fragments = tuple(
        _fragment(unit, index_of[piece.fqn], piece, group_of, master_C) for piece in pieces
    )
    return OptimizerChunk(
        span.begin, param_C.numel(), span.tier, param_C, master_C, fragments,
        page, state_C, host_chunk,
    )  # fmt: skip


def _dtypes(
    row: DtypeRow, groups: Iterable[int], state_dtypes: StateDtypes
) -> dict[str, torch.dtype]:
    """The flat tensors of a chunk: dtype by name. The master has name ""."""
    master = {"": row.master} if row.has_master else {}
    return master | {name: kept for group in groups for name, kept in state_dtypes(group).items()}


def _fragment(
    unit: Unit, index: int, piece: Fragment, group_of: Mapping[int, int], master_C: Tensor
) -> OwnedFragment:
    """A piece of a slot as the optimizer sees it: in the parameter's shape if it is all of it."""
    param, slot = unit.params[index], unit.layout.slots[index]
    value = master_C[piece.at : piece.at + piece.numel]
    if piece.numel == slot.numel:
        value = value.view(slot.shape)
    return OwnedFragment(
        param,
        index,
        group_of[id(param)],
        piece.begin,
        piece.at,
        piece.numel,
        value.detach(),
        value.detach(),
        value.shape,
    )


def _fill_master(
    shard: OptimizerShard, page: Page | None, master_C: Tensor, near_C: Tensor
) -> None:
    """Write the first values of a master into the tier's memory."""
    if page is None:
        master_C.copy_(near_C)
        return
    assert shard.pager is not None
    with shard.pager.open(page, changed=True):
        master_C.copy_(near_C)
        page.filled_nbytes = page_nbytes(master_C.numel(), [master_C.dtype])


def _copy_of(near_C: Tensor, dtype: torch.dtype, host: HostStaging | None) -> Tensor:
    if host is None:
        return near_C.to(dtype)
    return host.allocate(near_C.numel(), dtype).copy_(near_C)
