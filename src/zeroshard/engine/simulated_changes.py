"""Asks another process which changes of a run that had no memory would fit, by simulations of them."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from zeroshard.engine.draft import Draft
from zeroshard.engine.remedies import Remedy
from zeroshard.engine.run_description import RunDescription, describe, described
from zeroshard.launch.alone import run_alone
from zeroshard.parallel.pickled_model import NotDescribable

logger = logging.getLogger("zeroshard")

PROCESS = "zeroshard.planner.failed_run"
"""The module that answers."""

_FAILURES = (OSError, MemoryError, ValueError)
"""Of starting the process, and of one that was killed before it answered: ValueError."""

asked: list[int] = []
"""Has an entry if this process has asked."""


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
class StatesQuestion:
    """How many bytes a rank holds at least with each change, of which ``lines`` are the keys.

    The answer is a list of them, the first without a change; None: the run cannot be built so.
    """

    run: RunDescription
    lines: tuple[str, ...]
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
    found = _asked(
        lambda seconds: Question(describe(engine), room_nbytes, asked_nbytes, seconds),
        engine.settings.trust.simulate_changes_s,
        f"rank {engine.global_rank} could not allocate memory",
    )
    if isinstance(found, str):
        return Answer(reason=found)
    return Answer(tuple(Remedy(**row) for row in found))


def freed_by(draft: Draft, lines: Sequence[str]) -> list[int | None] | str:
    """Bytes by which each change lowers what this rank holds at least, before there is an engine.

    None: the run cannot be built with the change. A text: why nothing was simulated.
    """
    run = partial(described, draft.model, draft.loaded, draft.optimizer, draft.mesh, draft.device)
    found = _asked(
        lambda seconds: StatesQuestion(run(), tuple(lines), seconds),
        draft.loaded.config.trust.simulate_changes_s,
        "the state does not fit into memory",
    )
    if isinstance(found, str):
        return found
    before, *after = found
    return [None if nbytes is None else before - nbytes for nbytes in after]


def _asked(question: Callable[[float], Any], limit_s: float, why: str) -> list[Any] | str:
    """The answer of the other process, or a reason why there is none."""
    if not limit_s:
        return "trust.simulate_changes_s is 0"
    if asked:
        return "this process has simulated changes before"
    try:
        given = pickle.dumps(question(limit_s / 2))
        asked.append(1)
        logger.warning("%s; changes that would fit are simulated, for at most %.0f s", why, limit_s)
        said = run_alone(PROCESS, given, limit_s=limit_s)
        found = json.loads(said.rpartition(b"\n")[2])  # what is before it was printed by imports
    except NotDescribable as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"the simulations did not end in {limit_s:.0f} s"
    except _FAILURES as error:
        return f"the process of the simulation failed: {type(error).__name__}"
    answer: list[Any] | str = found.get("reason") or found["found"]
    return answer
