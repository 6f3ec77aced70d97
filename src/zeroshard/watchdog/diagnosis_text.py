"""The words of a diagnosis: calls, positions and places of ranks."""

from __future__ import annotations

import json
from itertools import pairwise

from zeroshard.comm.flight_recorder import Record
from zeroshard.watchdog.findings import SET_UP, RankStatus

COLUMNS = 200
_WORDS = {
    "all_gather": "gather",
    "reduce_scatter": "reduce",
    "gather_small": "exchange",
    "meet": "exchange",
}


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
