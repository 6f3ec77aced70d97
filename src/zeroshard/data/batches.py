"""Handles ranks with different numbers of batches.

A rank that stops early would leave the others waiting in a collective. Iterating through the engine makes
the ranks agree before every batch. If some have no batch, all ranks raise an error, or those without one
go on with weight 0 until all have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from zeroshard.data.data_loader import ResumableLoader, check_dataset
from zeroshard.errors import UnevenBatches

T = TypeVar("T")
_END: Any = object()


def agreed_batches(
    loader: Iterable[T],
    *,
    exchange: Callable[[Tensor], Tensor],
    shares: Sequence[int],
    join: bool,
    set_weight: Callable[[float, int], None],
) -> Iterator[T]:
    """Yield the loader's batches while any rank has one.

    ``exchange``: ``[1] -> [W, 1]``, one small collective of all ranks per batch. ``shares``: the
    data-parallel rank of each rank; the ranks of a tensor group have the same one.
    ``set_weight(own, active)``: this rank's weight (0 or 1) for the next batch, and the number of
    data-parallel ranks with weight 1. With ``join`` a rank without a batch repeats its last one with
    weight 0.

    Raises:
        UnevenBatches: on every rank: some ranks have no batch, and ``join`` is false, one of them never
            had a batch, or another rank of its tensor group has one.
    """
    iterator, index, everyone = iter(loader), 0, len({*shares})
    last: T = _END
    try:
        while True:
            batch = next(iterator, _END)
            votes = exchange(torch.tensor([float(batch is not _END)], dtype=torch.float64))
            has_batch = [bool(v) for v in votes[:, 0].tolist()]
            if not any(has_batch):
                return
            if why := _refusal(index, has_batch, shares, join=join):
                raise UnevenBatches(why)
            if all(has_batch):
                set_weight(1.0, everyone)
            else:
                given = {share for share, has in zip(shares, has_batch, strict=True) if has}
                set_weight(float(batch is not _END), len(given))
            last, index = (last if batch is _END else batch), index + 1
            assert last is not _END, "a rank without any batch was refused above"
            yield last
    finally:
        set_weight(1.0, 0)


def _refusal(index: int, has_batch: Sequence[bool], shares: Sequence[int], *, join: bool) -> str:
    """Why training may not go on with these votes; empty if it may."""
    if all(has_batch):
        return ""
    without = [rank for rank, has in enumerate(has_batch) if not has]
    given = {share for share, has in zip(shares, has_batch, strict=True) if has}
    if lost := [rank for rank in without if shares[rank] in given]:
        return _tensor_text(index, lost[0], shares)
    if not join or index == 0:
        return _text(index, without, has_batch, join=join)
    return ""


def _tensor_text(index: int, rank: int, shares: Sequence[int]) -> str:
    group = [other for other, share in enumerate(shares) if share == shares[rank]]
    return (
        f"rank {rank} has no batch {index}, but another one of the ranks {', '.join(map(str, group))} "
        "does. They train on the same samples (tensor or sequence ranks). Choose samples by "
        "engine.dp_rank and engine.dp_size."
    )


def _text(index: int, without: list[int], has_batch: Sequence[bool], *, join: bool) -> str:
    with_it = [r for r, has in enumerate(has_batch) if has]
    ranks = ", ".join(map(str, without))
    others = ", ".join(map(str, with_it))
    if join:
        return (
            f'rank{"s" if len(without) > 1 else ""} {ranks} never had a batch. With "uneven": '
            '"join" a rank repeats an earlier batch while the others finish. Give every rank at '
            "least one."
        )
    return (
        f"rank{'s' if len(without) > 1 else ''} {ranks} {'have' if len(without) > 1 else 'has'} no "
        f"batch {index} while rank{'s' if len(with_it) > 1 else ''} {others} "
        f"{'do' if len(with_it) > 1 else 'does'}. Every rank must see the same number of batches: "
        'drop or pad the rest (a DistributedSampler does), or set "uneven": "join" to let the '
        "others finish."
    )


def loader_for(
    engine: Any,
    dataset: Dataset[Any],
    batch_size: int | None = None,
    route: str = "train",
    pin_memory: bool = False,
    data_sampler: Any = None,
    collate_fn: Callable[..., Any] | None = None,
    num_local_io_workers: int | None = None,
) -> ResumableLoader:
    """A loader that gives every rank its part of the dataset (``engine.deepspeed_io``).

    Training data (``route="train"``) is shuffled. The sampler pads, so that all ranks have equally many
    batches. The loader can be resumed: see :class:`zeroshard.data.data_loader.ResumableLoader`.
    """
    check_dataset(dataset)
    return ResumableLoader(
        dataset,
        batch_size or engine.train_micro_batch_size_per_gpu(),
        dp_rank=engine.dp_rank,
        dp_size=engine.dp_size,
        is_main_rank=engine.is_main_rank,
        shuffle=route == "train",
        sampler=data_sampler,
        drop_last=engine.settings.dataloader_drop_last,
        pin_memory=pin_memory,
        collate_fn=collate_fn,
        num_workers=num_local_io_workers or 0,
    )
