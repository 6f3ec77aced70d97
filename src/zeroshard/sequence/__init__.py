"""Sequence parallelism: ranks that have different tokens of the same samples (Ulysses, arXiv 2309.14509).

Outside of attention a rank computes its own tokens. Attention needs all of them, so around it an
all-to-all exchanges tokens for heads: each rank then has all tokens of some heads (:mod:`.all_to_all`).
For ZeRO the ranks of a sequence group hold equal parameters and are part of the data axis.
"""

from __future__ import annotations

from zeroshard.sequence.all_to_all import mean_over_tokens
from zeroshard.sequence.attention import (
    DistributedAttention,
    SequenceAttention,
    register,
    unregister,
)
from zeroshard.sequence.split_batches import SequenceLoader, split_batch
from zeroshard.sequence.tiled import TiledMLP, sequence_tiled_compute
from zeroshard.sequence.token_positions import samples_begin_at_ranks

__all__ = [
    "DistributedAttention",
    "SequenceAttention",
    "SequenceLoader",
    "TiledMLP",
    "mean_over_tokens",
    "register",
    "samples_begin_at_ranks",
    "sequence_tiled_compute",
    "split_batch",
    "unregister",
]
