"""Cuts lists and tensors into parts for ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from zeroshard.deepspeed import collectives as comm
from zeroshard.errors import UsageError


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """``num_parts + 1`` indices at which to cut ``num_items``. The first parts have one more if needed.

    >>> partition_uniform(7, 3), partition_uniform(2, 4)
    ([0, 3, 5, 7], [0, 1, 2, 2, 2])
    """
    each, more = divmod(num_items, num_parts)
    return [part * each + min(part, more) for part in range(num_parts + 1)]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """``num_parts + 1`` indices at which to cut ``weights``.

    The heaviest part is as light as possible; under that condition the lightest is as heavy as possible.
    No part is empty if there are enough items. Cost: items^2 x parts.

    >>> partition_balanced([1, 1, 1, 9, 1, 1], 3)
    [0, 3, 4, 6]
    """
    count = len(weights)
    if count <= num_parts:
        return partition_uniform(count, num_parts)
    sums = [0.0, *accumulate(weights)]
    cuts = range(count + 1)

    def part(begin: int, end: int) -> float:
        return sums[end] - sums[begin]

    bound = _lightest_bound(part, count, num_parts)
    lightest = [part(0, end) if end and part(0, end) <= bound else -inf for end in cuts]
    came_from: list[list[int]] = []
    for _ in range(num_parts - 1):
        best = [_last_cut(part, lightest, end, bound) for end in cuts]
        lightest = [value for value, _ in best]
        came_from.append([at for _, at in best])
    places = [count]
    for row in reversed(came_from):
        places.append(row[places[-1]])
    return [0, *reversed(places)]


def _lightest_bound(part: Callable[[int, int], float], count: int, num_parts: int) -> float:
    """What the heaviest part weighs at least. ``part``: the weight from one cut to another."""
    cuts = range(count + 1)
    heaviest = [inf if end == 0 else part(0, end) for end in cuts]
    for _ in range(num_parts - 1):
        heaviest = [
            min((max(heaviest[at], part(at, end)) for at in range(1, end)), default=inf)
            for end in cuts
        ]
    return heaviest[count]


def _last_cut(
    part: Callable[[int, int], float], lightest: Sequence[float], end: int, bound: float
) -> tuple[float, int]:
    """Where the last part before ``end`` begins, with the weight of the lightest part so far.

    ``lightest``: of the parts before each cut. No part weighs more than ``bound``.
    """
    ways = (
        (min(lightest[at], part(at, end)), at) for at in range(1, end) if part(at, end) <= bound
    )
    return max(ways, default=(-inf, 0))


class PartitionedTensor:
    """A tensor of which each rank of ``group`` holds a flat piece (:func:`partition_uniform`)."""

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts: int = comm.get_world_size(group=group)
        self.rank: int = comm.get_rank(group=group)
        self.orig_size = list(tensor.shape)
        self.orig_device: Any = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        begin, end = self.partition[self.rank : self.rank + 2]
        self.local_data = tensor.detach().reshape(-1)[begin:end].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """The tensor that :meth:`to_meta` described, with this rank's piece of it.

        Raises:
            UsageError: the description is of another group size or rank.
        """
        numbers = meta.tolist()
        ndim, rest = numbers[0], numbers[1:]
        made = cls(torch.empty(0), group)
        if rest[ndim : ndim + 2] != [made.num_parts, made.rank]:
            raise UsageError(
                f"PartitionedTensor.from_meta: the description belongs to rank {rest[ndim + 1]} "
                f"of {rest[ndim]}, and this is rank {made.rank} of {made.num_parts}. Pass the one "
                "that to_meta() returned on this rank, in a group of the same size."
            )
        made.orig_size, made.partition = rest[:ndim], rest[ndim + 2 :]
        made.orig_device = local_part.device if device is None else device
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """What :meth:`from_meta` needs besides the data: sizes and cuts, as int64 ``[n]``."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """This rank's piece, flat."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's piece."""
        return self.local_data.shape

    def full_size(self) -> list[int]:
        """The shape of the whole tensor."""
        return self.orig_size

    def full(self, device: Any = None) -> Tensor:
        """A new tensor with all elements. Collective."""
        widths = [end - begin for begin, end in pairwise(self.partition)]
        widest = max(widths)
        own = self.local_data.new_zeros(widest)
        own[: self.local_data.numel()] = self.local_data
        pieces = [torch.empty_like(own) for _ in widths]  # of equal sizes, as gloo requires
        comm.all_gather(pieces, own, group=self.group)
        flat = torch.cat([piece[:width] for piece, width in zip(pieces, widths, strict=True)])
        assert flat.numel() == prod(self.orig_size)
        return flat.view(self.orig_size).to(self.orig_device if device is None else device)


def all_gather_dp_groups(
    groups_flat: Sequence[Tensor],
    partitioned_param_groups: Sequence[Sequence[Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int = 1,
    allgather_bucket_size: int = 0,
) -> None:
    """Fill every rank's part of each flat group from the rank that owns it, in place.

    ``partitioned_param_groups[g][r]``: the part of ``groups_flat[g]`` that rank ``r`` of
    ``dp_process_group[g]`` owns, as a view. The last two arguments have no effect. Collective.
    """
    for parts, group in zip(partitioned_param_groups, dp_process_group, strict=True):
        own = parts[comm.get_rank(group=group)]
        comm.all_gather(list(parts), own.clone(), group=group)
