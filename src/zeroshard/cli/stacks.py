"""The ``zeroshard stacks`` command: what every rank of a running job does now."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.runs import RunningArgument, recorded_run
from zeroshard.cli.telling import AsJson, errors_told

if TYPE_CHECKING:
    from zeroshard.watchdog.live_view import RankView, RunView


def stacks_command(
    run: RunningArgument = None,
    all_threads: Annotated[
        bool, typer.Option("--all-threads", help="Print the stacks of all threads of each rank.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds to wait for the answers of the ranks.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Print where every rank of a running program is: step, call, and Python stack."""
    from zeroshard.watchdog.live_view import view_run

    with errors_told():
        folder = recorded_run(run, living=True)
        seen = view_run(folder, threads=all_threads, limit_s=timeout)
    if as_json:
        print(json.dumps({"run": str(folder), "store": seen.lost or "answered",
                          "ranks": [_row(view) for view in seen.views]}, indent=1))  # fmt: skip
    else:
        print(_text(folder, seen))
    sys.stdout.flush()


def _row(view: RankView) -> dict[str, Any]:
    status = view.status
    flight = status.flight
    last = flight.records[-1] if flight is not None and flight.records else None
    return {
        "rank": status.rank,
        "host": status.host,
        "pid": view.pid,
        "answered": view.answered,
        "detail": status.detail,
        "step": flight.step if flight is not None else None,
        "phase": status.phase,
        "section": flight.section if flight is not None else "",
        "waits_in": status.wait.what if status.wait is not None else None,
        "waited_s": round(status.blocked_s, 3),
        "last_call": last and {"number": last.seq, "op": last.op, "unit": last.name},
        "at": status.stack,
        "stack": view.stack,
        "threads": view.stacks,
    }


def _text(folder: Path, seen: RunView) -> str:
    from zeroshard.comm.flight_recorder import rank_ranges

    answered = sum(view.answered for view in seen.views)
    lines = [
        f"run {folder.name}: {answered} of {len(seen.views)} ranks answered in {seen.took_s:.1f} s"
    ]
    if seen.lost:
        lines.append(f"The store does not answer ({seen.lost}); this is what the host shows.")
    lines += [_line(view) for view in seen.views]
    if not seen.with_stacks:
        lines.append("Ranks do not send stacks: trust.stacks is false.")
    alike: dict[tuple[str, str], list[int]] = {}
    for view in seen.views:
        if text := view.stacks or view.stack:
            title = (
                "all threads" if view.stacks else "main thread" if view.answered else "last stacks"
            )
            alike.setdefault((title, text), []).append(view.status.rank)
    for (title, text), ranks in alike.items():
        lines += ["", f"{title} of {rank_ranges(ranks)}:", text.rstrip()]
    return "\n".join(lines)


def _line(view: RankView) -> str:
    from zeroshard.watchdog.diagnosis_text import position_text

    status = view.status
    step = f", step {status.flight.step}" if status.flight is not None else ""
    where = position_text(status)
    if not view.answered:
        silent = "" if status.fate in ("gone", "left", "stopped") else "silent: "
        where = f"{silent}{status.detail}; last known: {where}"
    return f"rank {status.rank} (host {status.host}, pid {view.pid}){step}: {where}"
