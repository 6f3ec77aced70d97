"""Sequence ranks of Accelerate's ``ParallelismConfig``: their attention, and loaders that cut batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from zeroshard.deepspeed.ulysses import UlyssesSPAttentionHF, initialize_sequence_parallel
from zeroshard.errors import UsageError
from zeroshard.sequence import DistributedAttention, SequenceLoader


def sequence_size(config: Any) -> int:
    """The number of ranks that share the tokens of a sample, of a ``ParallelismConfig`` or None."""
    return int(getattr(config, "sp_size", None) or 1)


def open_sequences(config: Any) -> Any:
    """The process group of this rank's sequence group; None if no ranks share sequences. Collective.

    Raises:
        UsageError: the ranks cannot be divided so, or there are tensor ranks as well.
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
    return initialize_sequence_parallel(size).get_sequence_parallel_group()


def spread_attention(model: nn.Module, config: Any) -> None:
    """Let the attention of a model of Transformers exchange tokens and heads. Collective.

    A model with ``DistributedAttention`` does it by itself. In eval mode ranks share sequences, too, as
    the prepared loaders give them.

    Raises:
        UsageError: see :class:`~zeroshard.deepspeed.ulysses.UlyssesSPAttentionHF`.
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

    def _exchanged(self, *args: Any) -> Iterator[dict[str, Any]]:
        at_end = self.dl.end_of_dataloader
        for number, batch in enumerate(super()._exchanged(*args), 1):
            self.dl.end_of_dataloader = at_end and number == self.sp_world_size
            yield batch
