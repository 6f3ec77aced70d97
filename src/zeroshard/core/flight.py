"""Which collectives did the ranks call, and where do their histories part?

Pure arithmetic over records, without torch and without clocks of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

MASK_64 = (1 << 64) - 1
#: Odd multipliers: folding is a bijection of the word, so two words that differ never meet at once.
MULTIPLIER = 1_000_003
SIZE_MIX = 0x9E37_79B9_7F4A_7C15


class Record(NamedTuple):
    """One collective as one rank called it; ``at_s`` is that rank's monotonic clock."""

    seq: int
    op: str
    name: str
    nbytes: int
    dtype: str
    at_s: float


def word_of(*words: str) -> int:
    """64 bits that stand for some words; equal on every rank and in every run.

    >>> word_of("all_gather", "embed") == word_of("all_gather", "embed")
    True
    """
    return int.from_bytes(blake2b("\0".join(words).encode(), digest_size=8).digest(), "little")


def word_with(digest: int, nbytes: int, dtype: str) -> int:
    """The word of one collective: ``digest`` is ``word_of(operation, name)``."""
    return (digest ^ (nbytes * SIZE_MIX) ^ word_of(dtype)) & MASK_64


def fold(history: int, record: Record) -> int:
    """The running hash after one more collective. ``Recorder.enter`` inlines this formula."""
    word = word_with(word_of(record.op, record.name), record.nbytes, record.dtype)
    return (history * MULTIPLIER ^ word) & MASK_64


def rank_ranges(ranks: Iterable[int]) -> str:
    """Ranks as people write them.

    >>> rank_ranges([0, 1, 2, 4]), rank_ranges([3]), rank_ranges([6, 7])
    ('ranks 0-2,4', 'rank 3', 'ranks 6,7')
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(r) for r in run) for run in runs
    ]
    return ("rank " if len(ordered) == 1 else "ranks ") + ",".join(texts)
