"""Sequence ranks of Accelerate's ``ParallelismConfig``: their attention, and loaders that cut batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from zeroshard.deepspeed.parallel_init import UlyssesSPAttentionHF, initialize_sequence_parallel
from zeroshard.errors import UsageError
from zeroshard.sequence import DistributedAttention, SequenceLoader


def sequence_size(config: Any) -> int:
    """The number of ranks that share the tokens of a sample, of a ``ParallelismConfig`` or None."""
    return int(getattr(config, "sp_size", None) or 1)


def open_sequences(config: Any, *, is_stateful: bool) -> Any:
    """The process group of this rank's sequence group; None if no ranks share sequences. Collective.

    ``is_stateful``: the program asks for loaders with a state.

    Raises:
        UsageError: the ranks cannot be divided so, there are tensor ranks as well, or loaders have a
            state.
    """
    size = sequence_size(config)
    if size == 1:
        return None
    if config.tp_size > 1:
        raise UsageError(
            f"ParallelismConfig(sp_size={size}, tp_size={config.tp_size}): with sequence ranks the "
            "loaders of Accelerate give every process samples of its own, but tensor ranks must have the "
            "same. Use one of the two, or zeroshard.initialize() with zeroshard.sequence.split_batch()."
        )
    if is_stateful:
        raise UsageError(
            f"use_stateful_dataloader=True with ParallelismConfig(sp_size={size}): one batch of a loader "
            f"becomes {size} batches of the program, and between them its state is that after the last. "
            "A run that continues would lose the others. Leave it out, and continue with "
            "accelerator.skip_first_batches(loader, n)."
        )
    return initialize_sequence_parallel(size).get_sequence_parallel_group()


def spread_attention(model: nn.Module, config: Any) -> None:
    """Let the attention of a model of Transformers exchange tokens and heads. Collective.

    A model with ``DistributedAttention`` does it by itself. In eval mode ranks share sequences, too, as
    the prepared loaders give them.

    Raises:
        UsageError: see :class:`~zeroshard.deepspeed.parallel_init.UlyssesSPAttentionHF`.
    """
    if any(isinstance(module, DistributedAttention) for module in model.modules()):
        return
    asked = config.sp_handler
    UlyssesSPAttentionHF.register_with_transformers(
        model,
        asked.sp_attn_implementation,
        sequence_size(config),
        seq_length=asked.sp_seq_length,
        seq_length_is_variable=asked.sp_seq_length_is_variable,
    )


class PieceLoader(SequenceLoader):
    """A prepared loader whose batches the ranks of ``group`` share: see :class:`SequenceLoader`.

    Accelerate ends an accumulation with the last batch of a loader. Here that is the last of P pieces.
    """

    def __init__(self, dl: Any, group: Any, device: torch.device) -> None:
        super().__init__(dl, group.rank(), group, group.size(), device)
        self.prepared = dl  # from its first batch on
        self.skipped = 0  # pieces of the first batch of ``dl``, in every epoch
        self.piece = Piece(0, 0, False)  # the last one that was given
        dl.of_pieces = weakref.ref(self)

    def __len__(self) -> int:
        return max(super().__len__() - self.skipped, 0)

    @property
    def collate_fn(self) -> Any:
        """Not given: what reads it, such as Accelerate's functions, makes another loader of this one."""
        raise UsageError(
            "a loader made of the settings of this one would not cut its batches over sequence ranks, "
            "and would count other batches. To skip batches call accelerator.skip_first_batches(loader, "
            "n), not accelerate.skip_first_batches(); other loaders need accelerator.prepare()."
        )

    def after(self, count: int, skip: Callable[[Any, int], Any]) -> PieceLoader:
        """This loader without its first ``count`` pieces. ``skip``: leaves out batches of a loader."""
        whole, pieces = divmod(count + self.skipped, self.sp_world_size)
        made = PieceLoader(skip(self.dl, whole), self.sp_group, self.device)
        made.prepared, made.skipped = self.prepared, pieces
        return made

    def _epoch(self) -> Iterator[dict[str, Any]]:
        return islice(super()._epoch(), self.skipped, None)

    def _exchanged(self, *args: Any) -> Iterator[dict[str, Any]]:
        at_end = self.dl.end_of_dataloader
        for number, batch in enumerate(super()._exchanged(*args)):
            self.dl.end_of_dataloader = at_end and number + 1 == self.sp_world_size
            self.piece = Piece(number, batch["input_ids"].shape[1], at_end)
            yield batch

    def num_counted(self, rank: int, num_processes: int) -> int | None:
        """How many samples of the present piece are not there to fill the last batch; None: all.

        ``rank``: the first one of the sequence group that has the piece.
        """
        remainder = self._remainder() if self.piece.is_last else 0
        if not remainder:
            return None
        of_rank = int(self.prepared.total_batch_size) // num_processes
        return min(max(remainder - (rank + self.piece.number) * of_rank, 0), of_rank)

    def _remainder(self) -> int:
        """Samples of the last batch of all ranks, before it is filled; 0: a whole batch, or not known.

        Accelerate does not know it of its loaders that skip batches.
        """
        if self.prepared._drop_last:
            return 0
        try:
            return int(len(self.prepared.dataset) % self.prepared.total_batch_size)
        except (TypeError, AttributeError):  # no length, or no batches of one size
            return 0


@dataclass(frozen=True)
class Piece:
    """``number``: the place in its sequence group of the rank whose loader gave the batch.

    ``tokens``: those of one rank. ``is_last``: it is a piece of the last batch.
    """

    number: int
    tokens: int
    is_last: bool


def joined(accelerator: Any, values: Any, as_objects: bool) -> Any:
    """The tensors of all ranks, in the order of samples, without samples that fill the last batch.

    Tensors ``[B, t, ...]`` with this rank's number of tokens ``t`` become ``[samples, tokens, ...]``,
    whole sequences. Others ``[B, ...]`` must be equal on the ranks that share the samples. Collective.

    Raises:
        UsageError: they are not, ``values`` are other objects, or this is outside of a loop over a
            prepared loader; the same on every rank.
    """
    active = accelerator.gradient_state.active_dataloader
    loader = active.of_pieces() if hasattr(active, "of_pieces") else None
    try:
        recursively_apply(lambda x: x, values, error_on_other_type=True)
    except TypeError:
        as_objects = True
    if as_objects or loader is None:
        raise UsageError(
            "gather_for_metrics() with sequence ranks joins tensors of the batch that a prepared loader "
            "has given: call it with tensors, inside the loop over the loader. accelerator.gather() and "
            "accelerate.utils.gather_object() give what each process has."
        )
    size, num_processes = loader.sp_world_size, accelerator.num_processes
    counts = [loader.num_counted(rank, num_processes) for rank in range(0, num_processes, size)]

    def of_all(tensor: Tensor) -> Tensor:
        by_rank = tensor.unflatten(0, (len(counts), size, -1))  # [groups, ranks, samples, ...]
        if tensor.dim() > 1 and tensor.shape[1] == loader.piece.tokens:
            found = by_rank.movedim(1, 2).flatten(2, 3)
        elif torch.equal(by_rank.nan_to_num(), by_rank[:, :1].expand_as(by_rank).nan_to_num()):
            found = by_rank[:, 0]
        else:
            raise UsageError(
                f"gather_for_metrics() got a tensor of shape {tuple(by_rank.shape[2:])} that differs on "
                f"ranks which share samples. Its second dimension is not the {loader.piece.tokens} "
                "tokens of a rank, so it cannot be joined to sequences. Give values of tokens, without "
                "padding, or values of samples that are equal on these ranks (mean_over_tokens makes "
                "such). accelerator.gather() gives what each process has."
            )
        return torch.cat([own[:count] for own, count in zip(found, counts, strict=True)])

    return recursively_apply(of_all, accelerator.gather(values))
