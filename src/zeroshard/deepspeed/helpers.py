"""Small utilities that programs import from DeepSpeed, most of them from ``deepspeed.runtime.utils``."""

from __future__ import annotations

import functools
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from math import inf, prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.logs import logger
from zeroshard.device.choice import current_ops
from zeroshard.errors import UnsupportedError, UsageError
from zeroshard.memory.host_limits import gib, host_limits
from zeroshard.zero.access import safe_get_full_grad, safe_set_full_grad
from zeroshard.zero.sharded_parameter import in_order


class OnDevice:
    """Modules created inside have parameters on ``device`` and in ``dtype``; ``meta`` has no memory."""

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, torch.device(device), enabled
        self._before = torch.get_default_dtype()

    def __enter__(self) -> None:
        if not self.enabled:
            return
        self._before = torch.get_default_dtype()
        if self.dtype.is_floating_point:
            torch.set_default_dtype(self.dtype)
        self.device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self.device.__exit__(*error)
            torch.set_default_dtype(self._before)


class RepeatingLoader:
    """An iterator over a loader that starts again when the loader ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace each gradient by ``update_func(grad, param)``. Collective."""
    for param in in_order(param_list):
        grad = safe_get_full_grad(param)
        if grad is not None:
            safe_set_full_grad(param, update_func(grad, param))


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Show calls of the function as a range in NVIDIA's profiler."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with current_ops().profiler_range(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


def parse_range_list(rng: str) -> list[int]:
    """The numbers in a list such as ``0-3,8``, in order.

    Raises:
        ValueError: the ranges are not ascending, or overlap.

    >>> parse_range_list("0-2,5")
    [0, 1, 2, 5]
    """
    found: list[int] = []
    for part in rng.split(","):
        first, _, last = part.partition("-")
        cores = range(int(first), int(last or first) + 1)
        if not cores or (found and cores[0] <= found[-1]):
            raise ValueError(f"{rng!r}: give ranges in ascending order that do not overlap")
        found += cores
    return found


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Move the tensors of a nested structure to another device. Containers keep their type."""
    if criterion_func(item):
        return item.to(device)
    return _mapped(item, lambda inner: move_to_device(inner, device, criterion_func))


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Copies of the tensors of a nested structure, each with its own storage.

    ``torch.save`` would write the whole storage that a view belongs to.
    """
    if torch.is_tensor(item):
        moved = item.detach().to(device)
        return moved.clone() if moved.data_ptr() == item.data_ptr() else moved
    return _mapped(item, lambda inner: clone_tensors_for_torch_save(inner, device))


def _mapped(item: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(item, dict):
        return type(item)((key, change(inner)) for key, inner in item.items())
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return type(item)(*map(change, item))
    return type(item)(map(change, item)) if isinstance(item, (list, tuple)) else item


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the memory in use on this rank's device and host, if ``force``."""
    if not force:
        return
    in_use = current_ops().memory_in_use()
    if in_use is not None:
        used, most = in_use
        message = f"{message}: device {gib(used)}, at most {gib(most)}"
    logger.log(logging.INFO, "%s; %s", message, host_limits().in_words())


def clip_grad_norm_(
    parameters: Any, max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for ordinary gradients. An engine clips its own gradients.

    Raises:
        UnsupportedError: ``mpu`` has several model-parallel ranks, over which the norm would be added.
    """
    ranks = 1 if mpu is None else mpu.get_model_parallel_world_size()
    if ranks > 1:
        raise UnsupportedError(
            f"clip_grad_norm_(mpu=...) with {ranks} model-parallel ranks: which of these gradients are "
            "parts, and which are copies, is not known here. Pass the parameters of an engine without "
            "mpu, whose norm counts each element once, or use the key gradient_clipping."
        )
    return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Sequence[float]) -> float:
    """The 2-norm of a list of norms."""
    return math.sqrt(sum(norm**2.0 for norm in norm_list))


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def ensure_directory_exists(filename: str) -> None:
    """Create the directory of a file."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)


# ---------------------------------------------------------------------- modules by dotted name


def recursive_getattr(model: Any, module_name: str) -> Any:
    """The attribute at a dotted path below ``model``.

    >>> recursive_getattr([], "append.__name__")
    'append'
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Set ``module`` at a dotted path below ``model``."""
    parent, _, name = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, name, module)


# ---------------------------------------------------------------------- parts for ranks


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
