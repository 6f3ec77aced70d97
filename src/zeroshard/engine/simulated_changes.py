"""Asks another process which changes of a run that had no memory would fit, by simulations of them."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
from dataclasses import dataclass
from typing import Any

from zeroshard.engine.remedies import Remedy
from zeroshard.engine.run_description import RunDescription, describe
from zeroshard.launch.alone import run_alone
from zeroshard.parallel.pickled_model import NotDescribable

logger = logging.getLogger("zeroshard")

PROCESS = "zeroshard.planner.failed_run"
"""The module that answers."""

_FAILURES = (OSError, MemoryError, ValueError)
"""Of starting the process, and of one that was killed before it answered: ValueError."""

asked: list[int] = []
"""Ranks of the engines of this process that have asked: one does."""


@dataclass(frozen=True)
class Question:
    """What the other process gets.

    ``room_nbytes``: what the rank held on its device. ``asked_nbytes``: what it did not get on top. No
    simulation begins after ``seconds``.
    """

    run: RunDescription
    room_nbytes: int
    asked_nbytes: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """Changes that fit by simulation, by slowdown per byte. ``reason``: why there are none, or ""."""

    changes: tuple[Remedy, ...] = ()
    reason: str = ""


def ask(engine: Any, room_nbytes: int, asked_nbytes: int) -> Answer:
    """Changes of the run with which a step needs no more than the rank held: see :class:`Question`.

    A process asks once, because programs that look for a batch size run out of memory several times. For
    a small model it takes some seconds, at most ``trust.simulate_changes_s``.
    """
    limit_s = engine.settings.trust.simulate_changes_s
    if not limit_s:
        return Answer(reason="trust.simulate_changes_s is 0")
    if asked:
        return Answer(reason="this process has simulated changes before")
    try:
        question = Question(describe(engine), room_nbytes, asked_nbytes, limit_s / 2)
        asked.append(engine.global_rank)
        logger.warning(
            "rank %d could not allocate memory; it simulates changes that would fit, for at most %.0f s",
            engine.global_rank, limit_s,
        )  # fmt: skip
        said = run_alone(PROCESS, pickle.dumps(question), limit_s=limit_s)
        found = json.loads(said.rpartition(b"\n")[2])  # what is before it was printed by imports
    except NotDescribable as error:
        return Answer(reason=str(error))
    except subprocess.TimeoutExpired:
        return Answer(reason=f"the simulations did not end in {limit_s:.0f} s")
    except _FAILURES as error:
        return Answer(reason=f"the process of the simulation failed: {type(error).__name__}")
    if "reason" in found:
        return Answer(reason=found["reason"])
    return Answer(tuple(Remedy(**row) for row in found["changes"]))
