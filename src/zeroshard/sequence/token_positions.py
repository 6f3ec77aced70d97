"""What the ranks of a sequence group tell each other before the first attention of a forward.

Attention sees all tokens, but a rank knows the positions of its own. They are gathered once per forward,
together with what must be equal on all ranks, so that a mistake is one error on all of them. Packed
samples, in rows whose positions begin at 0 again, attend to themselves only.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.layer_calls import ranks_of
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.sequence.all_to_all import gathered

_HEADER = (
    "samples",
    "tokens",
    "heads",
    "key/value heads",
    "elements of a head",
    "rows of position_ids",
)


_BEGIN_AT_RANKS: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def samples_begin_at_ranks(group: dist.ProcessGroup) -> None:
    """Say that samples may begin at the first token of a rank in all rows, as if positions were missing.

    Rows that are packed of samples of one length have that. :func:`split_batch` and
    :class:`SequenceLoader` say it by themselves, when they have cut such a batch.
    """
    _BEGIN_AT_RANKS.add(group)


def begins_at_0(positions_PRt: Tensor) -> Tensor:
    """For each rank, whether its positions are 0, 1, 2, ... in every row; ``[P]`` bool."""
    at_t = torch.arange(positions_PRt.shape[2], device=positions_PRt.device)
    return (positions_PRt == at_t).flatten(1).all(1)


def sample_numbers(positions_RT: Tensor) -> Tensor:
    """For each token of a row, the number of the packed sample that it belongs to; 0 is the first."""
    starts = torch.ones_like(positions_RT, dtype=torch.bool)
    starts[:, 1:] = positions_RT.diff(dim=1) != 1
    return starts.cumsum(1) - 1


def causal_mask(positions_RT: Tensor, window: int | None) -> Tensor:
    """Which tokens a token attends to, ``[R, 1, T, T]`` bool: earlier ones of its sample, and itself.

    ``window``: only so many of the latest ones.
    """
    sample_RT = sample_numbers(positions_RT)
    at_T = torch.arange(positions_RT.shape[1], device=positions_RT.device)
    back_TT = at_T[:, None] - at_T[None, :]
    allowed = back_TT >= 0
    if window is not None:
        allowed = allowed & (back_TT < window)
    return (sample_RT[:, :, None] == sample_RT[:, None, :]).logical_and(allowed).unsqueeze(1)


@dataclass
class TokenPositions:
    """The positions of all tokens of a sequence, ``[R, T]``: one row for all samples, or one for each."""

    all_RT: Tensor
    is_packed: bool
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """The mask for attention that knows no positions; None: plain causal attention."""
        if window is not None and window >= self.all_RT.shape[1]:
            window = None
        if not self.is_packed and window is None:
            return None
        if window not in self._masks:
            self._masks[window] = causal_mask(self.all_RT, window)
        return self._masks[window]


class PositionExchange:
    """Gathers positions, and keeps them for the other layers of a forward.

    The layer that gathered does so again when it runs the next time, which is in the next forward, or
    when its activations are recomputed. Other layers use what it found if they have the same tensor of
    positions, unchanged: an address alone may be that of a freed tensor, on some of the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._first: weakref.ref[Any] | None = None
        self._ids: weakref.ref[Tensor] | None = None
        self._of: tuple[Any, ...] = ()
        self._found: TokenPositions | None = None

    def of(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None,
        window: int | None,
    ) -> TokenPositions | None:
        """The positions of all tokens; None if attention is not causal. Collective.

        ``mask``: what the model made of this rank's tokens alone.

        Raises:
            UsageError: ranks have unequal shapes, positions are missing, or a mask hides more than
                positions do.
            UnsupportedError: positions have several parts, as of images.
        """
        if position_ids is not None and position_ids.dim() != 2:
            raise UnsupportedError(
                f"position_ids have the shape {tuple(position_ids.shape)}. Sequence ranks know positions "
                "of text, [samples, tokens]; models with positions of images are not supported."
            )
        own = (*query.shape, key.shape[1], None if position_ids is None else position_ids._version)
        first = None if self._first is None else self._first()
        is_same = (None if self._ids is None else self._ids()) is position_ids
        if own == self._of and is_same and first is not None and first is not module:
            return self._found
        self._first, self._of = weakref.ref(module), own
        self._ids = None if position_ids is None else weakref.ref(position_ids)
        self._found = self._gather(query, key, position_ids, mask, window)
        return self._found

    def _gather(
        self,
        query: Tensor,
        key: Tensor,
        position_ids: Tensor | None,
        mask: Tensor | None,
        window: int | None,
    ) -> TokenPositions | None:
        samples, heads, tokens, width = query.shape
        rows = 0 if position_ids is None else position_ids.shape[0]
        hides = mask is not None and not _follows(mask, position_ids, window)
        own = [samples, tokens, heads, key.shape[1], width, rows, int(hides)]
        header = torch.tensor(own, dtype=torch.int64, device=query.device)
        seen = gathered(header, self.group, "shapes of attention").tolist()
        self._check(seen)
        if position_ids is None:
            return None
        all_PRt = gathered(position_ids.to(torch.int64), self.group, "positions")
        all_RT = all_PRt.transpose(0, 1).flatten(1)
        is_packed = sample_numbers(all_RT).any()
        *at_0, packed = torch.cat([begins_at_0(all_PRt), is_packed.view(1)]).tolist()
        if any(at_0[1:]) and self.group not in _BEGIN_AT_RANKS:
            ranks = ranks_of(self.group)
            anew = [rank for rank, found in zip(ranks, at_0, strict=True) if found]
            raise UsageError(
                f"position_ids are 0 to {tokens - 1} in every row of the ranks "
                f"{', '.join(map(str, anew))}, one sequence group, as if each had sequences of its own. "
                "They are probably missing, so that the model counted the tokens of one rank. Pass "
                "position_ids that were cut with the tokens (zeroshard.sequence.split_batch and the "
                "loaders do). If samples do begin at the first token of a rank in every row, call "
                "zeroshard.sequence.samples_begin_at_ranks(group)."
            )
        return TokenPositions(all_RT, packed)

    def _check(self, seen: list[list[int]]) -> None:
        ranks = ranks_of(self.group)
        for rank, row in zip(ranks, seen, strict=True):
            for name, value, expected in zip(_HEADER, row, seen[0], strict=False):
                if value != expected:
                    raise UsageError(
                        f"attention over the ranks {', '.join(map(str, ranks))}, one sequence group: "
                        f"rank {rank} has {value} {name}, and rank {ranks[0]} has {expected}. They share "
                        "the tokens of the same samples, and each needs equally many. Choose samples by "
                        "engine.dp_rank and engine.dp_size, and pad sequences to a multiple of the ranks."
                    )
        if odd := [rank for rank, row in zip(ranks, seen, strict=True) if row[-1]]:
            raise UsageError(
                f"attention of rank {odd[0]} got an attention_mask that hides more than tokens of later "
                "positions and of other packed samples. A rank sees a part of the tokens, so the mask of "
                "the whole sequence is unknown. Leave attention_mask out: pad after the samples, or pack "
                "them, with position_ids from 0 for each sample."
            )


def _follows(mask: Tensor, position_ids: Tensor | None, window: int | None) -> bool:
    """Whether positions explain the mask of this rank's tokens. Waits for the device."""
    if position_ids is None or mask.dim() != 4:
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask < 0
    expected = ~causal_mask(position_ids, window)
    if hidden.shape[-2:] != expected.shape[-2:]:
        return False
    return bool((hidden == expected).all())
