"""The exchanges of expert-parallel ranks: rows of tokens go to the ranks of their experts, and back.

``P``: ranks that share the experts of a layer. Each exchange is one all-to-all; its backward is the one
in the other direction. ``M``: elements of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.layer_calls import is_real_cpu, ranks_of, recorded
from zeroshard.errors import UsageError


class TokenLink:
    """The process group of one layer, None before it is connected. Copies of the layer share it."""

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None

    def __deepcopy__(self, memo: Any) -> TokenLink:
        return self

    def __reduce__(self) -> Any:
        return TokenLink, ()  # a layer that is loaded from a file is not connected

    def to_first(self, own: Tensor, place: int, numel: int) -> Tensor:
        """The ``numel`` values ``own`` of the rank at ``place``, on the first rank: flat. Collective.

        Empty on the other ranks, whose ``own`` only says dtype and device.
        """
        group = self.group
        assert group is not None
        me, ranks = group.rank(), range(group.size())
        sends, receives = me == place, me == 0
        rows = own.detach().reshape(-1, 1) if sends else own.new_empty(0, 1)
        sent = [numel if sends and at == 0 else 0 for at in ranks]
        got = [numel if receives and at == place else 0 for at in ranks]
        return exchange_rows(rows, sent, got, group).view(-1)


def exchange_rows(
    rows_NM: Tensor,
    sent: Sequence[int],
    got: Sequence[int],
    group: dist.ProcessGroup,
    *,
    places: int | None = None,
) -> Tensor:
    """Send ``sent[p]`` rows to each rank ``p``, and receive ``got[p]`` from it, in the order of ranks.

    ``rows_NM`` has ``sum(sent)`` rows; the result ``[sum(got), M]`` has its dtype. Numbers may be 0. The
    ranks call it together, also those without any row. Differentiable, any number of times.

    ``places``: the capacity that all ranks must have, if sizes follow from it. They are compared on CPU
    ranks, where a message of another size ends the process. On a GPU the host would have to wait.

    Raises:
        UsageError: on every rank: ``places`` are unequal.
    """
    done: Tensor = _Exchange.apply(rows_NM, tuple(sent), tuple(got), group, places)
    return done


def _check_places(seen: Sequence[int], group: dist.ProcessGroup) -> None:
    ranks = ranks_of(group)
    for rank, places in zip(ranks, seen, strict=False):
        if places != seen[0]:
            raise UsageError(
                f"the ranks {', '.join(map(str, ranks))} share the experts of a MoE layer with "
                f"drop_tokens=True: rank {ranks[0]} has {seen[0]} places at each expert, and rank {rank} "
                f"has {places}. The number of places follows from the number of tokens of a rank, and "
                "messages of unequal size do not fit. Pad the batches of all ranks to equally many "
                "tokens, or pass drop_tokens=False to MoE, where they may differ."
            )


def _of_all_ranks(number: int, group: dist.ProcessGroup) -> list[int]:
    own = torch.tensor([number], dtype=torch.int64)
    found = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(found, own, group=group)
    return [int(each) for each in found]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_NM: Tensor,
        sent: tuple[int, ...],
        got: tuple[int, ...],
        group: dist.ProcessGroup,
        places: int | None,
    ) -> Tensor:
        ctx.back = got, sent, group
        rows_NM = rows_NM.contiguous()
        received = rows_NM.new_empty((sum(got), *rows_NM.shape[1:]))
        moved = rows_NM.numel() - sent[group.rank()] * rows_NM[:1].numel()
        seen: list[int] = []
        with recorded(group, "tokens and experts", rows_NM, op="all_to_all", sent=moved):
            if places is not None and is_real_cpu(rows_NM):
                seen = _of_all_ranks(places, group)
            if len({*seen}) <= 1:
                # As bytes: the transports of the CPU do not know every dtype.
                dist.all_to_all_single(
                    _bytes(received), _bytes(rows_NM), [*got], [*sent], group=group
                )
        _check_places(seen, group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return exchange_rows(grad, *ctx.back), None, None, None, None


def _bytes(rows_NM: Tensor) -> Tensor:
    """The same memory as ``[N, bytes of a row]``."""
    width = rows_NM.shape[1] * rows_NM.element_size()
    return rows_NM.reshape(-1).view(torch.uint8).view(-1, width)


def exchange_counts(counts_PL: Tensor, group: dist.ProcessGroup) -> Tensor:
    """How many rows each rank will send for each of this rank's ``L`` experts, int64 ``[P, L]``.

    ``counts_PL``: how many this rank will send to each rank ``p`` for each of its experts.
    """
    counts_PL = counts_PL.contiguous()
    found = torch.empty_like(counts_PL)
    moved = counts_PL.numel() * (group.size() - 1) // group.size()
    with recorded(group, "sizes of exchanges", counts_PL, op="all_to_all", sent=moved):
        dist.all_to_all_single(found, counts_PL, group=group)
    return found
