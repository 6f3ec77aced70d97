"""What is known of ranks that wait, and what is concluded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeroshard import errors
from zeroshard.comm.flight_recorder import FlightRecording

READ = ", read"
"""Suffix of the names of gathers that a program started by reading values; no module needed them."""

TORCH = "torch.distributed"
"""Label of the sequence of calls that a program itself makes. Their numbers are not known."""

SET_UP = frozenset({"initialize", "zero.Init", "from_pretrained"})
"""Phases that have the time limit of the section ``setup``."""


class Wait(NamedTuple):
    """The call that a rank is blocked in: number ``seq`` of the sequence ``label``; ``what`` in words.

    ``source``: the only rank that the call needs; None: it needs all. ``behind``: another thread than the
    program's waits in it. ``collective``: it is a collective of an engine or of a model. ``members``: the
    ranks of its group; empty: all.
    """

    label: str
    seq: int
    what: str
    source: int | None = None
    behind: bool = False
    collective: bool = False
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankStatus:
    """What is known of one rank when a stall is diagnosed.

    ``flight``: its recording of the sequence that is asked about; None if it has not begun it.
    ``fate``: ``runs``; ``absent`` (has not called ZeroShard yet, or has closed what it had); ``left``
    (closed its engine); ``gone`` (its process ended); ``stopped`` (by a signal); ``waits`` (for a disk,
    and did not answer); ``silent`` (its interpreter does not run). ``detail`` is the same in words.
    ``stack``: where the main thread is, on one line. ``stacks``: all threads in full, for the file.
    ``phase``: what the program does there (``forward``, ``save``...). ``wait``: what it is blocked in.
    ``reached``: the number of its calls, by label of the sequence. ``failed``: what a call of this step
    ended with on this rank, whose program goes on. ``frozen_s``: for how long it can have stood still;
    None: as long as others have waited.
    """

    rank: int
    flight: FlightRecording | None
    fate: str = "runs"
    detail: str = ""
    answered: bool = True
    blocked_s: float = 0.0
    stack: str = ""
    stacks: str = ""
    host: str = ""
    phase: str = ""
    wait: Wait | None = None
    reached: Mapping[str, int] = field(default_factory=dict)
    failed: str = ""
    frozen_s: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """``kind``: the name of an error class. ``ranks``: those it names. ``fatal``: it ends the run.

    ``cause``: the ranks that are presumed the cause, and ``did``: what they did (``rank 1 <did>``), if it
    ends the run because of that.
    """

    kind: str
    fatal: bool
    ranks: tuple[int, ...]
    text: str
    cause: tuple[int, ...] = ()
    did: str = ""

    def error(self) -> errors.DistributedError:
        """The exception that a rank raises because of it."""
        kind: type[errors.DistributedError] = getattr(errors, self.kind, errors.DistributedError)
        error = kind(self.text)
        error.ranks, error.did = self.cause, self.did
        return error


def diagnosis_of_values(values: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of the values that :func:`dataclasses.asdict` gave, after their way through JSON."""
    ranks = {name: tuple(values.get(name, ())) for name in ("ranks", "cause")}
    return Diagnosis(**{**values, **ranks})
