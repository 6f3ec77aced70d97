"""Explains the end of a run from what it left in its folder: ``zeroshard explain``.

Four kinds of evidence, none of which is always there: the diagnoses of the watchdogs
(``hang-*.json``), the recordings of ranks that did not end cleanly, the launcher's reports
(``exit-*.json``), and ``ranks.json``.
The judgement is that of :func:`~.diagnosis.diagnose`; this module only gathers what it needs.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from zeroshard import errors
from zeroshard.comm.host import Process, this_process
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import EXIT_DIAGNOSIS, DistributedError, UsageError
from zeroshard.run.recordings import FlightRecording
from zeroshard.run.run_folder import KeptExit, read_exits
from zeroshard.watchdog.diagnosis import Diagnosis, diagnose, diagnosis_of_values
from zeroshard.watchdog.live_view import alive_here
from zeroshard.watchdog.rank_status import (
    RankStatus,
    call_text,
    cut,
    position_text,
    status_of_values,
)
from zeroshard.watchdog.run_record import (
    KeptEnd,
    RanksFile,
    newest_flight,
    read_kept,
    read_left,
    read_ranks,
    settled,
)
from zeroshard.watchdog.settings import WatchdogSettings

_LINE = re.compile(r"ranks? (\d[\d, -]*) (.*?)\.?$")
"""A line of a launcher: the ranks, and what it says about them."""
_NOT_FATAL = "none is known, as no rank left an error; the last report did not end the run"
_OTHERS = 3
"""Lines about ranks that are not the cause."""


@dataclass(frozen=True)
class DeadRun:
    """What is known of a run that ended. ``cause``: the ranks that ended it, as far as can be told.

    ``why``: the end of the cause in words. ``statuses``: the last known position of each rank.
    ``evidence``: the files that were read; ``damaged``: those that could not be, with the reason.
    """

    folder: Path
    attempt: int
    cause: tuple[int, ...]
    why: str
    diagnosis: Diagnosis | None
    statuses: Mapping[int, RankStatus]
    ends: Mapping[int, KeptEnd] = field(default_factory=dict)
    trace: str = ""
    evidence: Sequence[str] = ()
    damaged: Sequence[str] = ()

    @property
    def step(self) -> int | None:
        """The newest step of any rank."""
        return max((w.flight.step for w in self.statuses.values() if w.flight), default=None)


@dataclass(frozen=True)
class _Hang:
    path: Path
    diagnosis: Diagnosis
    statuses: tuple[RankStatus, ...]

    @property
    def seq(self) -> int:
        return max((w.flight.seq for w in self.statuses if w.flight), default=0)

    @property
    def pids(self) -> set[int]:
        return {w.flight.pid for w in self.statuses if w.flight}


@dataclass(frozen=True)
class _Evidence:
    """What was read of the newest attempt. ``hangs``: the oldest first."""

    file: RanksFile | None
    ends: Mapping[int, KeptEnd]
    hangs: Sequence[_Hang]
    exits: Sequence[KeptExit]

    @property
    def attempt(self) -> int:
        return max([self.file.attempt if self.file else 0, *(each.attempt for each in self.exits)])

    @property
    def names(self) -> tuple[str, ...]:
        hangs = [hang.path.name for hang in self.hangs[-1:]]
        ends = [f"recordings of {rank_ranges(self.ends)}"] if self.ends else []
        return (*hangs, *ends, *(f"exit-{each.host}-{each.attempt}.json" for each in self.exits))

    def main_flights(self) -> dict[int, FlightRecording | None]:
        return {rank: _main_flight(end.flights) for rank, end in self.ends.items()}

    def last_hang(self) -> _Hang | None:
        """The newest diagnosis, unless the run went on after it."""
        if not self.hangs:
            return None
        newest = max((flight.seq for flight in self.main_flights().values() if flight), default=0)
        # A fatal diagnosis ended the run. After others it may have gone on, with calls of higher numbers.
        last = self.hangs[-1]
        return last if last.diagnosis.fatal or last.seq >= newest else None

    def statuses(self, hang: _Hang | None) -> dict[int, RankStatus]:
        """The last known position of each rank; that of ``hang`` is newer than that of a recording."""
        known = {rank: _status_of(rank, end) for rank, end in self.ends.items()}
        for seen in hang.statuses if hang is not None else ():
            status = seen if seen.answered else replace(seen, flight=settled(seen.flight))
            if status.flight is not None or status.rank not in self.ends:
                known[status.rank] = status
        return dict(sorted(known.items()))


def explain_run(folder: Path) -> DeadRun:
    """Read what the run of ``folder`` left, and judge.

    Raises:
        UsageError: the run still lives, or it left nothing that could be read.
    """
    damaged = list[str]()
    found = _evidence_of(folder, damaged)
    hang = found.last_hang()
    statuses = found.statuses(hang)
    cause, why = _first_cause(found.exits, found.ends)
    diagnosis = None
    if hang is not None and hang.diagnosis.fatal:
        diagnosis = hang.diagnosis
    elif hang is not None and not (found.ends or found.exits):
        why, diagnosis = _NOT_FATAL, hang.diagnosis
    elif statuses:
        diagnosis = _judge(statuses, found.main_flights(), cause)
    if not cause and not why and diagnosis is not None:
        cause = diagnosis.ranks if len(diagnosis.ranks) < max(len(statuses), 2) else ()
    trace = next((each.trace for each in found.exits if each.root in cause), "")
    return DeadRun(
        folder, found.attempt, cause, why, diagnosis, statuses, found.ends, trace,
        found.names, tuple(damaged),
    )  # fmt: skip


def text_of(run: DeadRun) -> str:
    """The explanation, in at most ten lines."""
    step = "" if run.step is None else f", newest step {run.step}"
    lines = [f"run {run.folder.name}, attempt {run.attempt}: {len(run.statuses)} ranks known{step}"]
    if run.why and run.cause:
        lines += [*_lines_of_cause(run), *_lines_of_others(run)]
    elif run.diagnosis is not None:
        title, *rest = run.diagnosis.text.splitlines()
        said = f"{run.why}; " if run.why else ""
        lines += [f"likely cause: {said}{title.partition(' (')[0]}", *rest]
    else:
        lines += [f"likely cause: {run.why or 'unknown'}", *_lines_of_others(run)]
    lines.append("evidence: " + (", ".join(run.evidence) or "none"))
    if run.damaged:
        more = f" (and {len(run.damaged) - 1} more)" if len(run.damaged) > 1 else ""
        lines.append(f"cannot be read: {run.damaged[0]}{more}")
    return "\n".join(cut(line, 1000 if line.startswith("likely") else 240) for line in lines)


def _lines_of_cause(run: DeadRun) -> list[str]:
    first = run.cause[0]
    status, end = run.statuses.get(first), run.ends.get(first)
    host = "" if end is None else f" (host {end.peer.process.host}, pid {end.peer.process.pid})"
    at = f", step {status.flight.step}" if status is not None and status.flight else ""
    lines = [f"likely cause: {rank_ranges(run.cause)}{host}{at}: {run.why}"]
    if place := _raised_at(run.trace):
        lines.append(f"  raised at {place}")
    if status is not None and (where := _last_of(status)):
        lines.append(f"  {where}")
    return lines


def _raised_at(trace: str) -> str:
    """The innermost line of the program in a traceback; empty if there is none."""
    frames = re.findall(r'File "(.+)", line (\d+), in (.+)', trace)
    own = [
        frame for frame in frames if not re.search(r"[\\/](site-packages|zeroshard)[\\/]", frame[0])
    ]
    return "{}:{} in {}".format(*(own or frames)[-1]) if frames else ""


def _last_of(status: RankStatus) -> str:
    """The last calls of the rank that is the cause, and what it waited in."""
    if status.flight is None or not status.flight.records:
        return ""
    records = status.flight.records
    words = f"its last call was {call_text(records[-1])}"
    unit = next((r for r in reversed(records) if r.op in ("all_gather", "reduce_scatter")), None)
    if unit not in (None, records[-1]):
        words += f", its last unit {unit.name!r} in {call_text(unit)}"
    waits = _waits(status)
    return f"{words}; {position_text(status)}" if waits else words


def _lines_of_others(run: DeadRun) -> list[str]:
    """What the other ranks did, one line for those in the same place, the largest group first."""
    places: dict[str, list[int]] = defaultdict(list)
    for rank, status in run.statuses.items():
        if rank not in run.cause:
            end = run.ends.get(rank)
            reason = end.reason.partition(":")[0] if end is not None else ""
            ended = f"; ended with {reason.split()[0]}" if reason else ""
            places[position_text(status) + ended].append(rank)
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[1][0]))
    lines = [f"  {rank_ranges(ranks)}: {place}" for place, ranks in ordered[:_OTHERS]]
    if rest := [rank for _, ranks in ordered[_OTHERS:] for rank in ranks]:
        lines.append(f"  {rank_ranges(rest)}: in other places (--json lists them)")
    return lines


# -- evidence --------------------------------------------------------------------------------------


def _evidence_of(folder: Path, damaged: list[str]) -> _Evidence:
    here = this_process()
    file = _ranks_file(folder, damaged)
    if file is not None and alive_here(file, here):
        alive = [r for r, p in file.peers.items() if p.is_on(here) and p.fate(here)[0] != "gone"]
        raise UsageError(
            f"the run of {folder} still lives: {rank_ranges(alive)} of {len(file.peers)} run here. Try: "
            f"zeroshard stacks {folder}"
        )
    ends = _ends_of(folder, file, here, damaged)
    hangs = _hangs_of(folder, file, damaged)
    exits = read_exits(folder, damaged)
    if not (ends or hangs or exits):
        _refuse(folder, file, damaged)
    return _Evidence(file, ends, hangs, exits)


def _ranks_file(folder: Path, damaged: list[str]) -> RanksFile | None:
    try:
        return read_ranks(folder)
    except FileNotFoundError:
        return None
    except (UsageError, OSError) as error:
        damaged.append(str(error))
        return None


def _ends_of(
    folder: Path, file: RanksFile | None, here: Process, damaged: list[str]
) -> dict[int, KeptEnd]:
    """How each rank of the newest attempt ended, if it did not end cleanly."""
    kept = sorted(read_kept(folder, damaged), key=lambda end: end.at)
    if file is None:
        return {end.peer.rank: end for end in kept}
    found = {e.peer.rank: e for e in kept if file.peers[e.peer.rank].process == e.peer.process}
    for rank, peer in file.peers.items():
        if (
            rank not in found
            and peer.is_on(here)
            and (left := read_left(peer, damaged)) is not None
        ):
            found[rank] = left
    return dict(sorted(found.items()))


def _hangs_of(folder: Path, file: RanksFile | None, damaged: list[str]) -> list[_Hang]:
    """The evidence of the watchdogs of the newest attempt, the oldest first."""
    pids = {peer.process.pid for peer in file.peers.values()} if file is not None else None
    found = []
    for path in sorted(folder.glob("hang-*.json"), key=lambda each: each.stat().st_mtime):
        try:
            row = json.loads(path.read_text())
            diagnosis = diagnosis_of_values(row["diagnosis"])
            hang = _Hang(path, diagnosis, tuple(map(status_of_values, row["statuses"])))
        except (OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{path}: {error}")
            continue
        if pids is None or not hang.pids or hang.pids & pids:
            found.append(hang)
    return found


def _refuse(folder: Path, file: RanksFile | None, damaged: Sequence[str]) -> None:
    if damaged:
        raise UsageError(f"nothing of the run of {folder} can be read: {'; '.join(damaged[:3])}.")
    what = "" if file is None else f" of its {len(file.peers)} ranks"
    raise UsageError(
        f"{folder} has no recording{what}, no report of a launcher and no evidence of a stall. A run "
        "that ends without an error leaves none, nor does one of a single rank."
    )


# -- the judgement ---------------------------------------------------------------------------------


def _main_flight(flights: Mapping[str, FlightRecording]) -> FlightRecording | None:
    """The recording of the newest session over all ranks. Groups' names are like ``0-holders``."""
    numbers = [int(name) for name in flights if name.isdigit()]
    return flights[str(max(numbers))] if numbers else None


def _status_of(rank: int, end: KeptEnd) -> RankStatus:
    return RankStatus(rank, newest_flight(end.flights), answered=False, host=end.peer.process.host)


def _first_cause(
    exits: Sequence[KeptExit], ends: Mapping[int, KeptEnd]
) -> tuple[tuple[int, ...], str]:
    """The ranks that ended the run by an error of their own, or were killed, and why; none: not known."""
    reports = (each for each in exits if each.root is not None and not each.consequence)
    if reported := next(filter(None, (_reported_cause(each, len(ends)) for each in reports)), None):
        return reported
    own = [end for end in ends.values() if end.reason and not _is_consequence(end.reason)]
    if own:
        first = min(own, key=lambda end: end.at)
        return (first.peer.rank,), first.reason
    silent = [rank for rank, end in ends.items() if not end.reason]
    if silent and len(silent) < len(ends):
        return tuple(silent), "its process ended without a word: killed, or ended by a crash"
    return (), "every rank was ended from outside at the same time" if silent else ""


def _reported_cause(report: KeptExit, known: int) -> tuple[tuple[int, ...], str] | None:
    """What a launcher's report names as the cause; None: an end that is the consequence of another."""
    found = _LINE.match(report.lines[0]) if report.lines else None
    if found is None:
        assert report.root is not None
        return (report.root,), f"exit code {report.exitcode}"
    if _is_consequence(found[2]):
        return None
    ranks = _ranks_in(found[1])  # one line for ranks that ended alike
    alone = len(ranks) == 1 or len(ranks) < known
    return (ranks, found[2]) if alone else ((), report.lines[0].rstrip("."))


def _ranks_in(words: str) -> tuple[int, ...]:
    """The ranks of ``0-2, 5``."""
    spans = [span.split("-") for span in words.replace(" ", "").split(",")]
    return tuple(rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1))


def _is_consequence(reason: str) -> bool:
    """Whether a rank ended because of others: by the diagnosis of all ranks, or a broken connection."""
    kinds = (getattr(errors, word, None) for word in re.findall(r"\w+", reason))
    told = any(isinstance(kind, type) and issubclass(kind, DistributedError) for kind in kinds)
    return told or f"exit code {EXIT_DIAGNOSIS}" in reason


def _judge(
    statuses: Mapping[int, RankStatus],
    main: Mapping[int, FlightRecording | None],
    cause: Iterable[int],
) -> Diagnosis | None:
    """The diagnosis from recordings: histories of all ranks can be compared, those of groups cannot.

    None: nothing shows that one rank waited for another.
    """
    gone = set(cause)
    seen = [
        replace(
            status,
            flight=main.get(rank, status.flight),
            fate="gone" if rank in gone else "runs",
            detail="its process ended" if rank in gone else "",
        )
        for rank, status in statuses.items()
    ]
    found = diagnose(seen, WatchdogSettings(), blocked_s=0.0)
    return None if found.kind == "TransportStuck" and not any(map(_waits, seen)) else found


def _waits(status: RankStatus) -> bool:
    return status.wait is not None or bool(status.flight and status.flight.waiting)
