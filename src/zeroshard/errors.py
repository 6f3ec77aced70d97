"""Which exceptions does ZeroShard raise?

One tree. Every message says what happened, with which value, why it matters and what to do, and is the
same on every rank that can know it. ``assert`` is kept for ZeroShard's own invariants.
"""

from __future__ import annotations


class ZeroShardError(RuntimeError):
    """Base of every error that ZeroShard raises on purpose."""


class ConfigError(ZeroShardError, ValueError):
    """The configuration is wrong; the text lists every problem found, one per line."""


class UnsupportedError(ZeroShardError):
    """A known feature that ZeroShard does not offer (yet), with the reason."""


class UsageError(ZeroShardError):
    """A call that cannot work as made: wrong order, wrong type, wrong moment."""


class ShardedAccess(UsageError):
    """A sharded parameter was written, or read in strict mode, outside its unit."""


class UnitStateError(ZeroShardError):
    """A unit was asked to cross an edge that its state table does not have."""


class LossScaleError(ZeroShardError):
    """fp16 gradients stay non-finite although the loss scale is at its minimum."""


class UnevenBatches(ZeroShardError):
    """Some ranks have a batch where others have none."""


class DiskError(ZeroShardError):
    """The disk tier cannot hold, read or write state; the text gives path, offset and bytes."""


class HostMemoryError(ZeroShardError):
    """What the ranks of a host plan to hold exceeds the memory they may use; the text has a table."""


class CheckpointError(ZeroShardError):
    """A checkpoint could not be written or read; nothing that existed before was touched."""


class DistributedError(ZeroShardError):
    """Base of everything that concerns several ranks."""


class RankMismatch(DistributedError):
    """Ranks disagree on something that must be equal before the first collective."""


class RankDivergence(DistributedError):
    """Ranks called different collectives, or the same ones in another order."""


class RankLost(DistributedError):
    """A rank's process ended or its connection closed."""


class RankFrozen(DistributedError):
    """A rank is alive but does not run: stopped, waiting for a disk, or holding the interpreter lock."""


class RankLate(DistributedError):
    """A rank stays outside collectives for longer than its section allows."""


class TransportStuck(DistributedError):
    """All ranks wait in the same collective and no byte moves."""


class LaunchError(ZeroShardError):
    """The launcher could not start the ranks, or one of them died."""


def in_short(error: BaseException) -> str:
    """An error on one line of at most 600 characters, for other ranks."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]
