"""Cuts batches over the ranks of a sequence group.

A batch is a mapping. Its tensors ``[B, T, ...]``, with the ``T`` of ``input_ids``, are cut along ``T``;
the rest goes to every rank as it is. Labels are shifted before they are cut, because the label of a
rank's last token is the first token of the next rank: ``labels`` becomes ``shift_labels``, of which
position ``i`` is the label of token ``i``. ``position_ids [B, T]`` tell attention where a token is.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zeroshard.errors import DistributedError, UsageError
from zeroshard.sequence.all_to_all import as_bytes
from zeroshard.sequence.token_positions import begins_at_0, samples_begin_at_ranks

logger = logging.getLogger("zeroshard")

IGNORED = -100
"""The label of a token that does not count."""


def whole_batch(batch: Any, size: int) -> dict[str, Any]:
    """A batch of whole sequences, ready to be cut over ``size`` ranks.

    ``attention_mask`` is left out: with causal attention, padding after a sample changes none of its
    tokens.

    Raises:
        UsageError: ``input_ids`` or ``position_ids`` are missing or have other shapes, the length does
            not divide, or a sample has padding before a token.
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), Tensor):
        raise UsageError(
            f"a batch for sequence parallelism is a {type(batch).__name__} without a tensor 'input_ids'; "
            "it must be a mapping with input_ids [samples, tokens]."
        )
    shape = tuple(batch["input_ids"].shape)
    for key in ("input_ids", "position_ids", "labels", "shift_labels"):
        value = batch.get(key)
        if isinstance(value, Tensor) and (value.dim() < 2 or tuple(value.shape[:2]) != shape[:2]):
            raise UsageError(
                f"a batch has {key} of shape {tuple(value.shape)}, and input_ids of shape {shape}; both "
                "must begin with [samples, tokens], because they are cut along the tokens."
            )
    tokens = shape[1]
    if tokens % size:
        raise UsageError(
            f"a batch has {tokens} tokens, which {size} sequence ranks cannot divide. Pad its samples to "
            f"{-(-tokens // size) * size} tokens, with labels of {IGNORED}."
        )
    if not isinstance(batch.get("position_ids"), Tensor):
        raise UsageError(
            "a batch has no position_ids: a rank with a part of a sequence cannot know where its tokens "
            "are. Let the collator add them: torch.arange(tokens) for each sample, and from 0 again at "
            "each sample of a packed row."
        )
    made = dict(batch)
    _check_padding(made.pop("attention_mask", None), tokens)
    if isinstance(labels := made.pop("labels", None), Tensor):
        made["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    return made


def _check_padding(mask: Any, tokens: int) -> None:
    if not isinstance(mask, Tensor):
        return
    is_padding = mask.dim() == 2 and mask.shape[1] == tokens
    if not is_padding or bool((mask[:, 1:].bool() & ~mask[:, :-1].bool()).any()):
        raise UsageError(
            f"a batch has an attention_mask of shape {tuple(mask.shape)} that hides tokens before "
            "others. Sequence ranks use causal attention and position_ids: pad after the samples, or "
            "pack them into rows with position_ids from 0 for each sample."
        )


def piece_of(value: Any, tokens: int, at: int, size: int) -> Any:
    """Piece ``at`` of ``size`` of what is cut, contiguous: losses view it. Anything else is passed on."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != tokens:
        return value
    length = tokens // size
    return value[:, at * length : (at + 1) * length].contiguous()


def digest(batch: Mapping[str, Any], found: int = 0) -> int:
    """A checksum of the tensors of a batch, after ``found``, that of earlier batches."""
    for key in sorted(batch):
        if isinstance(batch[key], Tensor):
            words = as_bytes(batch[key].detach().cpu().contiguous()).numpy()
            found = zlib.crc32(words.tobytes(), found)
    return found


def split_batch(
    batch: Mapping[str, Any], group: dist.ProcessGroup, *, check: bool = False
) -> dict[str, Any]:
    """This rank's tokens of a batch that all ranks of the sequence group have.

    ``position_ids`` are added if there are none. ``check``: compare the batch with those of the other
    ranks, as one should for the first batch. Collective then.

    Raises:
        UsageError: see :func:`whole_batch`; or a rank has another batch.
    """
    size, at = group.size(), group.rank()
    try:
        made = whole_batch(_with_positions(batch), size)
    except UsageError:
        if check:  # the other ranks wait for this one's checksum
            dist.all_gather_object([None] * size, None, group=group)
        raise
    if check:
        _compare(digest(made), group)
    if _has_begins_at_ranks(made, size):
        samples_begin_at_ranks(group)
    tokens = made["input_ids"].shape[1]
    return {key: piece_of(value, tokens, at, size) for key, value in made.items()}


def _with_positions(batch: Any) -> Any:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() < 2 or "position_ids" in batch:
        return batch
    return {**batch, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}


def _compare(own: int, group: dist.ProcessGroup) -> None:
    """Check that all ranks have the checksum ``own``. One without a batch that can be cut has None."""
    seen: list[Any] = [None] * group.size()
    dist.all_gather_object(seen, own, group=group)
    ranks = dist.get_process_group_ranks(group)
    odd = [rank for rank, other in zip(ranks, seen, strict=True) if other != seen[0]]
    if odd:
        raise UsageError(
            f"ranks {', '.join(map(str, odd))} have another batch than rank {ranks[0]}, but the "
            f"ranks {', '.join(map(str, ranks))} share the tokens of the same samples. Choose "
            "samples by engine.dp_rank and engine.dp_size, which are equal in a sequence group, and "
            "shuffle with equal seeds."
        )


def _has_begins_at_ranks(made: Mapping[str, Any], size: int) -> bool:
    """Whether a sample begins at the first token of a rank after the first, in all rows of the batch."""
    positions_RT = made["position_ids"]
    if positions_RT.dim() != 2 or positions_RT.shape[1] != made["input_ids"].shape[1]:
        return False  # attention says what is wrong, on every rank
    positions_PRt = positions_RT.unflatten(1, (size, -1)).transpose(0, 1)
    return bool(begins_at_0(positions_PRt)[1:].any())


@dataclass
class _Offer:
    """What a rank tells the others of its next batch."""

    ended: bool = False
    error: str = ""
    digest: int = 0
    begins_at_ranks: bool = False
    kept: dict[str, Any] = field(default_factory=dict)  # what is not cut: as it is
    cut: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(
        default_factory=dict
    )  # of one piece

    @property
    def piece_nbytes(self) -> int:
        """Bytes of one rank's piece."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.cut.values())


class SequenceLoader:
    """A loader for a rank of a sequence group, over a loader that gives each rank other samples.

    One batch of each of the P ranks becomes P batches, one after another: every rank has a part of the
    tokens of the same batch. So there are P times as many batches, and all ranks together see the samples
    that they see without it. The arguments and the order are DeepSpeed's
    (``UlyssesSPDataLoaderAdapter``). Batches: see this module; they need ``position_ids``. Their lengths
    may differ from rank to rank.

    ``sp_group``: the sequence group, of ``sp_world_size`` ranks; this one is number ``sp_rank``.
    ``device``: where tensors are exchanged. They come back to the device of the loader.

    Raises:
        UsageError: the numbers are not those of the group. On every rank of the group, while iterating: a
            rank has no batch while others do, or one that cannot be cut.
        DistributedError: the loader of another rank failed.
    """

    def __init__(
        self, dl: Any, sp_rank: int, sp_group: dist.ProcessGroup, sp_world_size: int, device: Any
    ) -> None:
        if (sp_group.rank(), sp_group.size()) != (sp_rank, sp_world_size):
            raise UsageError(
                f"SequenceLoader: sp_rank is {sp_rank!r} and sp_world_size {sp_world_size!r}, but this "
                f"is rank {sp_group.rank()} of {sp_group.size()} in sp_group. Pass what the mpu of the "
                "sequence group says."
            )
        self.dl, self.device = dl, torch.device(device)
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self._running: Iterator[dict[str, Any]] | None = None
        self._has_compared = False

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> SequenceLoader:
        self._running = None
        return self

    def __next__(self) -> dict[str, Any]:
        if self._running is None:
            self._running = self._epoch()
        try:
            return next(self._running)
        except BaseException:
            self._running = None
            raise

    def _epoch(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.dl)
        while True:
            offer, pieces, failure = self._next_offer(batches)
            offers: list[Any] = [None] * self.sp_world_size
            dist.all_gather_object(offers, offer, group=self.sp_group)
            if failure is not None:
                raise failure
            self._check(offers)
            if offer.ended:
                return
            yield from self._exchanged(offers, pieces)

    def _next_offer(
        self, batches: Iterator[Any]
    ) -> tuple[_Offer, list[list[Tensor]], Exception | None]:
        """What this rank offers, the tensors for each rank, and its error."""
        size = self.sp_world_size
        try:
            made = whole_batch(next(batches), size)
        except StopIteration:
            return _Offer(ended=True), [], None
        except Exception as error:  # the other ranks wait for this one's offer
            return _Offer(error=f"{type(error).__name__}: {error}"), [], error
        tokens = made["input_ids"].shape[1]
        offer = _Offer(
            digest=0 if self._has_compared else digest(made),
            begins_at_ranks=_has_begins_at_ranks(made, size),
        )
        pieces: list[list[Tensor]] = [[] for _ in range(size)]
        for key, value in made.items():
            first = piece_of(value, tokens, 0, size)
            if first is value:
                offer.kept[key] = value
                continue
            offer.cut[key] = tuple(first.shape), first.dtype
            for at in range(size):
                pieces[at].append(piece_of(value, tokens, at, size))
        return offer, pieces, None

    def _check(self, offers: list[_Offer]) -> None:
        ranks = dist.get_process_group_ranks(self.sp_group)
        for rank, offer in zip(ranks, offers, strict=True):
            if offer.error:
                raise DistributedError(f"rank {rank} could not give its next batch: {offer.error}")
        ended = [rank for rank, offer in zip(ranks, offers, strict=True) if offer.ended]
        if ended and len(ended) < len(ranks):
            raise UsageError(
                f"ranks {', '.join(map(str, ended))} have no further batch, but other ranks of their "
                f"sequence group ({', '.join(map(str, ranks))}) do. Each rank's loader must have equally "
                "many batches: drop or pad the rest (a DistributedSampler does)."
            )
        if any(offer.begins_at_ranks for offer in offers):
            samples_begin_at_ranks(self.sp_group)
        if self._has_compared or ended:
            return
        self._has_compared = True
        if len(ranks) > 1 and len({offer.digest for offer in offers}) == 1:
            logger.warning(
                "the ranks %s, one sequence group, loaded the same samples, and each of their batches is "
                "trained on, so every sample will be used %d times. Divide samples over all ranks.",
                ", ".join(map(str, ranks)),
                len(ranks),
            )

    def _exchanged(
        self, offers: list[_Offer], pieces: list[list[Tensor]]
    ) -> Iterator[dict[str, Any]]:
        """This rank's pieces of the batch of each rank. Everything goes in one message."""
        home = next((tensor.device for tensor in pieces[0]), torch.device("cpu"))
        sent = [as_bytes(tensor.to(self.device).contiguous()) for own in pieces for tensor in own]
        sizes = [offer.piece_nbytes for offer in offers]
        got = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        own_sizes = [offers[self.sp_rank].piece_nbytes] * self.sp_world_size
        dist.all_to_all_single(got, torch.cat(sent), sizes, own_sizes, group=self.sp_group)
        for offer, piece in zip(offers, got.to(home).split(sizes), strict=True):
            made, begin = dict(offer.kept), 0
            for key, (shape, dtype) in offer.cut.items():
                nbytes = torch.Size(shape).numel() * dtype.itemsize
                # cloned: a view at any byte could not have the dtype, and would keep the whole message
                made[key] = piece[begin : begin + nbytes].clone().view(dtype).view(shape)
                begin += nbytes
            yield made
