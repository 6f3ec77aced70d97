"""The ``zeroshard explain`` command: why a run ended, from what it left in its folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zeroshard.cli.runs import EndedArgument, recorded_run
from zeroshard.cli.telling import AsJson, errors_told

if TYPE_CHECKING:
    from zeroshard.watchdog.dead_run import DeadRun


def explain_command(run: EndedArgument = None, as_json: AsJson = False) -> None:
    """Say why a run ended: which rank was the cause, and where every rank was."""
    from zeroshard.watchdog.dead_run import explain_run, text_of

    with errors_told():
        found = explain_run(recorded_run(run, living=False))
    print(json.dumps(_values(found), indent=1) if as_json else text_of(found))


def _values(run: DeadRun) -> dict[str, Any]:
    from zeroshard.watchdog.diagnosis_text import call_text, position_text

    ranks = []
    for rank, status in run.statuses.items():
        flight, end = status.flight, run.ends.get(rank)
        records = flight.records if flight is not None else ()
        ranks.append(
            {
                "rank": rank,
                "host": status.host,
                "pid": flight.pid if flight is not None else None,
                "step": flight.step if flight is not None else None,
                "unit": records[-1].name if records else None,
                "last_calls": [call_text(record) for record in records[-8:]],
                "position": position_text(status),
                "reason": end.reason if end is not None else "",
                "threads": status.stacks,
            }
        )
    diagnosis = run.diagnosis
    return {
        "run": str(run.folder),
        "attempt": run.attempt,
        "cause": {"ranks": run.cause, "why": run.why, "trace": run.trace},
        "diagnosis": diagnosis and {"kind": diagnosis.kind, "text": diagnosis.text},
        "ranks": ranks,
        "evidence": run.evidence,
        "damaged": run.damaged,
    }
