"""Takes tokens to their experts and brings the results back: two dispatchers, and their exchanges.

``S``: tokens of a rank. ``M``: elements of a token. ``E``: experts of the layer, ``L`` of which are on
each of ``P`` ranks. ``K``: experts per token. ``C``: places of a rank at each expert.

A dispatcher computes the weighted sum of the experts' results for each token, ``[S, elements of a
result]`` in the dtype of the results. It is collective over ``group``; None: one rank has all. A token
that was dropped everywhere gets zeros. Each exchange is one all-to-all; its backward is the one in the
other direction.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.layer_calls import is_real_cpu, ranks_of, recorded
from zeroshard.errors import UsageError
from zeroshard.experts.gate import Routes


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


RunExperts = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Runs the experts of this rank: the rows of each, 4-dim with the elements of a token last."""


def dispatch_to_places(
    x_SM: Tensor, routes: Routes, run: RunExperts, group: dist.ProcessGroup | None
) -> Tensor:
    """The dispatcher for a capacity: each rank has C places at each expert, and empty ones are zeros.

    All messages have the same size, which the host knows, so it waits for no device. Sends, in each
    direction and in forward and backward, ``(P - 1) / P * E * C * M`` elements.

    Raises:
        UsageError: on every rank of ``group``: they have unequal C. On CPU ranks only.
    """
    (tokens, width), experts = x_SM.shape, len(routes.counts_E)
    places = routes.capacity
    assert places is not None
    empty = experts * places
    slot_SK = torch.where(routes.expert_SK >= 0, routes.expert_SK * places + routes.place_SK, empty)
    source = torch.full((empty + 1,), tokens, dtype=torch.int64, device=x_SM.device)
    token_SK = torch.arange(tokens, device=x_SM.device).unsqueeze(1).expand_as(slot_SK)
    source.scatter_(0, slot_SK.flatten(), token_SK.flatten())
    rows = torch.cat([x_SM, x_SM.new_zeros(1, width)])[source[:-1]]
    size = 1 if group is None else group.size()
    share = [empty // size] * size
    if group is not None:
        rows = exchange_rows(rows, share, share, group, places=places)
    rows_PLCM = rows.view(size, experts // size, places, width)
    done = torch.cat(list(run(rows_PLCM.split(1, dim=1))), dim=1)
    done = done.reshape(empty, done.shape[-1])
    if group is not None:
        done = exchange_rows(done, share, share, group)
    done = torch.cat([done, done.new_zeros(1, done.shape[-1])])
    return _weighted(done[slot_SK.flatten()], routes)


def dispatch_all(
    x_SM: Tensor, routes: Routes, run: RunExperts, group: dist.ProcessGroup | None
) -> Tensor:
    """The dispatcher that drops no token. Sizes are exchanged first, then exactly the rows that move.

    The host waits for the sizes. Sends, in each direction and in forward and backward, K rows per token,
    without those that stay. One rank may get the rows of all ranks.
    """
    expert = routes.expert_SK.flatten()
    experts, per_token = len(routes.counts_E), routes.expert_SK.shape[1]
    # Tokens that go nowhere (padding) come last, and are cut off.
    key = torch.where(expert >= 0, expert, experts)
    order = key.argsort(stable=True)
    sent, got = _sizes(key, experts, group)
    num_sent = [sum(row) for row in sent]
    order = order[: sum(num_sent)]
    rows = x_SM[order // per_token]
    if group is not None:
        num_got = [sum(row) for row in got]
        rows = exchange_rows(rows, num_sent, num_got, group)
        done = _by_expert(rows, got, run)
        done = exchange_rows(done, num_got, num_sent, group)
    else:
        done = _by_expert(rows, got, run)
    back = torch.zeros(len(expert), done.shape[1], dtype=done.dtype, device=done.device)
    return _weighted(back.index_copy(0, order, done), routes)


def _sizes(
    key: Tensor, experts: int, group: dist.ProcessGroup | None
) -> tuple[list[list[int]], list[list[int]]]:
    """How many rows this rank sends to each expert of each rank, and how many it gets from each rank.

    ``key``: the expert of each row, in any order; ``experts`` for rows that go nowhere.
    """
    size = 1 if group is None else group.size()
    if isinstance(key, FakeTensor):  # a plan, which has no values
        counts_PL = key.new_empty(size, experts // size)
        if group is not None:
            exchange_counts(counts_PL, group)
        place = 0 if group is None else group.rank()
        return planned_sizes(len(key), experts, size, place if _ALL_HERE.get() else None)
    counts_PL = torch.bincount(key, minlength=experts + 1)[:experts].view(size, -1)
    got_PL = counts_PL if group is None else exchange_counts(counts_PL, group)
    # One copy to the host for both.
    sent, got = torch.stack([counts_PL, got_PL]).tolist()
    return sent, got


_ALL_HERE: ContextVar[bool] = ContextVar("all tokens go to the experts of this rank", default=False)


@contextlib.contextmanager
def all_tokens_here() -> Iterator[None]:
    """In plans, which have no values, let the tokens of all ranks go to the experts of this rank.

    Outside of the context they are spread evenly.
    """
    before = _ALL_HERE.set(True)
    try:
        yield
    finally:
        _ALL_HERE.reset(before)


def planned_sizes(
    rows: int, experts: int, size: int, place: int | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """What :func:`dispatch_all` is planned to exchange: rows for each expert of each rank, and from them.

    Each rank has ``rows``. ``place``: all go to the experts of this rank; None: to all experts, and this
    rank has the first ones, which get one more if ``rows`` does not divide.

    >>> planned_sizes(6, 4, 2), planned_sizes(6, 4, 2, place=1)
    (([[2, 2], [1, 1]], [[2, 2], [2, 2]]), ([[0, 0], [3, 3]], [[3, 3], [3, 3]]))
    """
    own = experts // size
    if place is not None:
        counts = _spread(rows, own)
        sent = [counts if at == place else [0] * own for at in range(size)]
        return sent, [counts] * size
    counts = _spread(rows, experts)
    return [counts[at : at + own] for at in range(0, experts, own)], [counts[:own]] * size


def _spread(rows: int, parts: int) -> list[int]:
    least, more = divmod(rows, parts)
    return [least + (part < more) for part in range(parts)]


def _by_expert(rows: Tensor, got_PL: Sequence[Sequence[int]], run: RunExperts) -> Tensor:
    """Run the experts on rows that are sorted by the rank they came from, then by expert.

    Every expert runs, also one without a row: so its parameters have gradients on every rank, or on none.
    """
    if len(got_PL) == 1:
        pieces = list(rows.split(list(got_PL[0])))
    else:
        flat = [count for row in got_PL for count in row]
        parts, local = rows.split(flat), len(got_PL[0])
        pieces = [torch.cat(parts[at::local]) for at in range(local)]
    done = [
        each.reshape(-1, each.shape[-1]) for each in run([p.view(1, 1, *p.shape) for p in pieces])
    ]
    if len(got_PL) == 1:
        return torch.cat(done)
    split = [each.split([row[at] for row in got_PL]) for at, each in enumerate(done)]
    return torch.cat([of_expert[rank] for rank in range(len(got_PL)) for of_expert in split])


def _weighted(rows: Tensor, routes: Routes) -> Tensor:
    """The sum over a token's experts of weight times result. ``rows``: ``[S * K, M]``."""
    tokens, per_token = routes.weight_SK.shape
    summed = (rows.view(tokens, per_token, rows.shape[-1]) * routes.weight_SK.unsqueeze(-1)).sum(1)
    return summed.to(rows.dtype)
