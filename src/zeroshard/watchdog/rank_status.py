"""What is known of a rank, from its own answer or from what its host shows of it; the same in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.comm.host import Process
from zeroshard.errors import CLOSED
from zeroshard.run.recordings import FlightRecording, Record, read_recording_file
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.stacks import innermost

READ = ", read"
"""Suffix of the names of gathers that a program started by reading values; no module needed them."""

SET_UP = frozenset({"initialize", "zero.Init", "from_pretrained"})
"""Phases that have the time limit of the section ``setup``."""

COLUMNS = 200
_WORDS = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "gather_small": "exchange",
    "meet": "exchange",
}


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


def status_from_answer(peer: Peer, answer: Mapping[str, Any]) -> RankStatus:
    """The status of a rank from its own answer."""
    left = answer["left"]
    return RankStatus(
        rank=peer.rank,
        flight=_flight_of(answer["flight"]),
        fate="runs" if left is None else "left",
        detail="" if left is None else f"left: {left}",
        blocked_s=answer["blocked_s"],
        stack=answer["stack"],
        stacks=answer["stacks"],
        host=peer.process.host,
        phase=answer["phase"],
        failed=answer["failed"],
        wait=_wait_of(answer["wait"]),
        reached=answer["reached"],
    )


def status_of_values(values: Mapping[str, Any]) -> RankStatus:
    """The status that was written as JSON into the evidence of a diagnosis."""
    return RankStatus(
        **{**values, "flight": _flight_of(values["flight"]), "wait": _wait_of(values["wait"])}
    )


def _flight_of(fields: Sequence[Any] | None) -> FlightRecording | None:
    if not fields:
        return None
    flight = FlightRecording(*fields)
    return flight._replace(records=tuple(Record(*record) for record in flight.records))


def _wait_of(fields: Sequence[Any] | None) -> Wait | None:
    """The wait in an answer. JSON has no tuples, and equal waits must compare equal."""
    if not fields:
        return None
    wait = Wait(*fields)
    return wait._replace(members=tuple(wait.members))


def status_from_host(peer: Peer, here: Process, *, asked: bool = True) -> RankStatus:
    """The status of a rank that does not answer, or was not ``asked``, from what this host knows."""
    fate, detail = peer.fate(here)
    if fate in ("runs", "waits") and peer.has_left(here):
        fate, detail = "left", CLOSED
    if fate == "waits" and not asked:  # seen once: it may run the next moment
        fate, detail = "runs", ""
    flight = read_recording_file(Path(peer.recording)) if fate != "unknown" else None
    if fate == "unknown" or (fate == "runs" and asked):
        known = "" if flight is None else "its process runs but "
        fate, detail = "silent", f"{known}does not answer"
    return RankStatus(
        rank=peer.rank,
        flight=flight,
        fate=fate,
        detail=detail,
        answered=False,
        host=peer.process.host,
    )


def with_stack(status: RankStatus, peer: Peer, here: Process) -> RankStatus:
    """The status, with the stack of a process of this host that runs but does not answer."""
    if status.fate != "silent":
        return status
    stack = innermost(peer.ask_for_stack(here))
    return replace(status, stack=stack, detail=f"{status.detail} (in {stack})") if stack else status


def without_connection(status: RankStatus) -> RankStatus:
    """The status of a rank whose connection broke: if it runs and does not wait, it closed its end."""
    if status.fate == "silent":
        return replace(status, fate="gone", detail="its connection closed; it does not answer")
    if status.fate == "runs" and not (status.flight and status.flight.waiting):
        return replace(status, fate="left", detail="it closed its end of the connection")
    return status


# -- in words --------------------------------------------------------------------------------------


def call_text(record: Record, *, sizes: bool = False) -> str:
    """A record in words: ``gather 'layers.0' (#19)``."""
    op, _, rest = record.op.partition(" ")
    what = f"{_WORDS.get(op, op)}{' ' + rest if rest else ''} {record.name!r} (#{record.seq})"
    return f"{what} of {record.nbytes} bytes {record.dtype}" if sizes else what


def position_text(status: RankStatus) -> str:
    """Where a rank is: its call, what the program does there, and the program's line."""
    place, doing = place_of(status), doing_of(status)
    if status.wait is None and (status.flight is None or not status.flight.waiting):
        place = f"outside collectives, {place}" if status.answered else place
    elif status.blocked_s >= 0.1:
        place += f" for {status.blocked_s:.1f} s"
    return f"{place}{f', in {doing}' if doing else ''}{line_of(status)}"


def conditional(*gathered: Record) -> str:
    """The config key that lets ranks skip these modules. Numbers in a name become ``*``."""
    modules = [record.name.partition("#")[0].split(".") for record in gathered]
    patterns = {
        ".".join("*" if part.isdigit() else part for part in parts): None for parts in modules
    }
    return f'"conditional_modules": {json.dumps(list(patterns))}'


def cut(line: str, columns: int = COLUMNS) -> str:
    """``line``, cut to ``columns`` characters."""
    return line if len(line) <= columns else line[: columns - 3] + "..."


def records_of(status: RankStatus) -> tuple[Record, ...]:
    return status.flight.records if status.flight else ()


def what_follows(status: RankStatus, first: Record, then: Record, seq: int) -> bool:
    """Whether this rank calls ``then`` after ``seq``, or called it right after ``first`` earlier."""
    records = records_of(status)
    if any(r.seq > seq and r.call == then.call for r in records):
        return True
    return any(
        a.seq < seq and a.call == first.call and b.call == then.call for a, b in pairwise(records)
    )


def place_of(status: RankStatus) -> str:
    flight, wait = status.flight, status.wait
    if wait is not None:
        return f"waiting in {wait.what}"
    if flight is None:
        return "nothing is known"
    waiting = next((r for r in flight.records if r.seq == flight.waiting), None)
    if waiting is not None:
        return f"waiting in {call_text(waiting)}"
    if not flight.records:
        return "before the first collective"
    return f"after {call_text(flight.records[-1])}"


def whereabouts(status: RankStatus) -> str:
    """Where a rank is that others wait for."""
    if status.fate == "absent":
        return status.detail
    if status.wait is not None:
        return f"{place_of(status)}{line_of(status)}"
    section = f"section {section_of(status)}: " if section_of(status) else ""
    doing = f"in {status.phase}: " if status.phase and not section else ""
    failed = f", after {status.failed}" if status.failed else ""
    where = f"outside collectives, {section}{doing}{status.stack or 'no stack'}"
    return cut(where, 160) + failed if failed else where


def doing_of(status: RankStatus) -> str:
    return status.phase or section_of(status)


def last_call(status: RankStatus) -> str:
    records = records_of(status)
    return f"; its last call was {call_text(records[-1])}" if records else ""


def section_of(status: RankStatus) -> str:
    if status.flight is not None and status.flight.section:
        return status.flight.section
    return "setup" if status.phase in SET_UP else ""


def line_of(status: RankStatus) -> str:
    """The program's line and the line that called it, in parentheses."""
    return f" ({' < '.join(status.stack.split(' < ')[:2])})" if status.stack else ""


def host_of(status: RankStatus) -> str:
    return f" ({status.host})" if status.host else ""


def capitalized(text: str) -> str:
    return text[0].upper() + text[1:]
