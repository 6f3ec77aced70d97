"""The exceptions that ZeroShard raises.

All derive from :class:`ZeroShardError`. Every message says what happened, with which value, why it
matters and what to do. It is the same on every rank that can know it. ``assert`` is only for
ZeroShard's own invariants.
"""

from __future__ import annotations

PLAN_COMMAND = "zeroshard plan MODEL --config ds.json --ranks N --memory GIB --fit speed"
"""Finds the fastest stage, offload and micro-batch that fit; without ``--fit``, plans what is given."""
NO_TUNING = (
    "nothing needs tuning: sizes are derived from the model. For the fastest stage, offload and "
    f"micro-batch that fit, run: {PLAN_COMMAND}"
)
"""Why there is no autotuning, and what to do instead."""


class ZeroShardError(RuntimeError):
    """Base of every error that ZeroShard raises on purpose."""


class ConfigError(ZeroShardError, ValueError):
    """The configuration is wrong. The message lists every problem that was found, one per line."""


class UnsupportedError(ZeroShardError):
    """A known feature that ZeroShard does not have (yet). The message says why."""


class UsageError(ZeroShardError):
    """A call that cannot work: wrong order, wrong type or wrong time."""


class ShardedAccess(UsageError):
    """A sharded parameter was written, or read in strict mode, while it was not unsharded."""


class UnitStateError(ZeroShardError):
    """A unit was asked for a change of state that its state table does not have."""


class LossScaleError(ZeroShardError):
    """fp16 gradients stay non-finite although the loss scale is at its minimum."""


class NonFiniteError(ZeroShardError):
    """The gradient of a step is NaN or infinite, and ``trust.nan_policy`` does not let training go on."""


class UnevenBatches(ZeroShardError):
    """Some ranks have a batch and others have none left."""


class DiskError(ZeroShardError):
    """The disk tier cannot hold, read or write state. The message gives path, offset and bytes."""


class HostMemoryError(ZeroShardError):
    """The ranks of a host would need more memory than they may use. The message has a table."""


class CheckpointError(ZeroShardError):
    """A checkpoint could not be written or read. Nothing that existed before was changed."""


class DistributedError(ZeroShardError):
    """Base of all errors that concern several ranks.

    ``on_all_ranks``: every rank raises it at this point, so no rank has to be told. ``ranks``: those that
    were the cause, and ``did``: what they did (``rank 1 <did>``); empty: no rank is presumed to be it.
    """

    on_all_ranks = False
    ranks: tuple[int, ...] = ()
    did = ""


class RankMismatch(DistributedError):
    """Ranks disagree on something that must be equal before the first collective."""


class RankDivergence(DistributedError):
    """Ranks called different collectives, or the same collectives in another order."""


class RankLost(DistributedError):
    """A rank's process ended or its connection closed."""


class RankFrozen(DistributedError):
    """A rank's process lives but runs no Python.

    It is stopped, waits for a disk, or one of its threads holds the interpreter lock.
    """


class RankLate(DistributedError):
    """A rank stays outside collectives for longer than its section allows."""


class TransportStuck(DistributedError):
    """All ranks wait in the same collective and it does not end."""


class LaunchError(ZeroShardError):
    """The launcher could not start the ranks, or one of them died."""


EXIT_DIAGNOSIS = 75
"""Exit code of a rank that the watchdog ends, because its main thread cannot raise the diagnosis."""


ENDED, CLOSED = "ended its program", "closed its engine"
"""Why a rank has left that raised no error. Other ranks' diagnoses say so, and the launcher reads it."""


def in_short(error: BaseException) -> str:
    """Type and message of an error on one line of at most 600 characters, to send to other ranks.

    ``sys.exit(0)`` is no error: it ends the program.
    """
    if isinstance(error, SystemExit) and not error.code:
        return ENDED
    return " ".join(f"{type(error).__name__}: {error}".split())[:600]
