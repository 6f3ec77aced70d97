"""Turns a failure of one rank into the same error on all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from zeroshard.comm.control_group import ControlGroup
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError, DistributedError


def run_on_all_ranks(
    control_group: ControlGroup,
    failed: str,
    topic: str,
    act: Callable[[], dict[str, Any] | None],
    decide: Callable[[list[dict[str, Any]]], dict[str, Any]] = lambda _said: {},
) -> dict[str, Any]:
    """Call ``act`` on every rank, ``decide`` on rank 0 with all results, and return its decision to all.

    Results and decisions are dicts that JSON can hold.

    Raises:
        CheckpointError: on every rank, if ``act`` failed on one or ``decide`` failed. The text is
            made of rank 0's ``failed``, of ``topic`` and of the reason.
        RankLost: another rank ended.
        RankLate: another rank did not make this call in time.
    """
    failure: Exception | None = None
    try:
        text = json.dumps(act() or {})
    except DistributedError:
        raise
    except Exception as error:  # of whatever kind: the other ranks wait for a text from this one
        failure, text = error, json.dumps({"error": _words(error)})
    texts = control_group.gather(text, topic=topic)
    reply: str | None = None
    if texts is not None:
        said = [json.loads(text) for text in texts]
        wrong = {rank: part["error"] for rank, part in enumerate(said) if "error" in part}
        try:
            why, text = _all_words(wrong), "" if wrong else json.dumps(decide(said))
        except Exception as error:
            failure, why = error, _words(error)
        reply = json.dumps({"error": f"{failed} (while {topic}). {why}"}) if why else text
    decision: dict[str, Any] = json.loads(control_group.broadcast(reply, topic=topic))
    if "error" in decision:
        raise CheckpointError(decision["error"]) from failure
    return decision


def _words(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {reason(error)}."
    return f"{type(error).__name__}: {error}"


def _all_words(wrong: Mapping[int, str]) -> str:
    """The reasons of the failed ranks; a reason that several ranks gave appears once."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in wrong.items():
        ranks_by_text.setdefault(text, []).append(rank)
    lines = [f"{rank_ranges(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
    rest = f" (and {len(lines) - 3} other reasons)" if len(lines) > 3 else ""
    return " ".join(lines[:3]) + rest
