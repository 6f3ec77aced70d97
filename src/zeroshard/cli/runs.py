"""The commands about a run: ``zeroshard report`` (a page), ``explain`` (its end), ``stacks`` (now)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zeroshard.cli.telling import AsJson, errors_told, note
from zeroshard.errors import UsageError
from zeroshard.run.run_folder import default_root, find_run

if TYPE_CHECKING:
    from zeroshard.watchdog.dead_run import DeadRun
    from zeroshard.watchdog.live_view import RankView, RunView

_HELP = (
    "The folder of a run, or a directory of such folders, of which {} is taken. Default: the directory "
    "where runs are recorded if trust.dump_dir names none."
)

RunArgument = Annotated[Path | None, typer.Argument(help=_HELP.format("the newest run"))]
RunningArgument = Annotated[
    Path | None, typer.Argument(help=_HELP.format("the newest run that is running"))
]
EndedArgument = Annotated[
    Path | None, typer.Argument(help=_HELP.format("the newest run that has ended"))
]


def recorded_run(run: Path | None, *, living: bool | None = None) -> Path:
    """The folder of the run that a user names.

    ``living``: rather one whose processes still run, or one whose processes have ended.

    Raises:
        UsageError: there is none.
    """
    try:
        return find_run(default_root() if run is None else run, note, living=living)
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


def report_command(
    run: RunArgument = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: report.html in that folder."),
    ] = None,
) -> None:
    """Make one HTML page of a run: curves, memory, traffic, times, configuration, incidents.

    The page has no scripts and loads nothing.
    """
    from zeroshard.report.page import make_page

    with errors_told():
        folder = recorded_run(run)
        target = output or folder / "report.html"
        page = make_page(folder)
        try:
            target.write_text(page, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error}") from error
    print(f"{target}  ({len(page.encode()) / 1000:.0f} kB)")


def explain_command(run: EndedArgument = None, as_json: AsJson = False) -> None:
    """Say why a run ended: which rank was the cause, and where every rank was."""
    from zeroshard.watchdog.dead_run import explain_run, text_of

    with errors_told():
        found = explain_run(recorded_run(run, living=False))
    print(json.dumps(_values(found), indent=1) if as_json else text_of(found))


def _values(run: DeadRun) -> dict[str, Any]:
    from zeroshard.watchdog.rank_status import call_text, position_text

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
        "answered": view.status.answered,
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
    from zeroshard.core.texts import rank_ranges

    answered = sum(view.status.answered for view in seen.views)
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
                "all threads"
                if view.stacks
                else "main thread"
                if view.status.answered
                else "last stacks"
            )
            alike.setdefault((title, text), []).append(view.status.rank)
    for (title, text), ranks in alike.items():
        lines += ["", f"{title} of {rank_ranges(ranks)}:", text.rstrip()]
    return "\n".join(lines)


def _line(view: RankView) -> str:
    from zeroshard.watchdog.rank_status import position_text

    status = view.status
    step = f", step {status.flight.step}" if status.flight is not None else ""
    where = position_text(status)
    if not view.status.answered:
        silent = "" if status.fate in ("gone", "left", "stopped") else "silent: "
        where = f"{silent}{status.detail}; last known: {where}"
    return f"rank {status.rank} (host {status.host}, pid {view.pid}){step}: {where}"
