"""Reads in a diagnosis that a rank printed which ranks it says were the cause, and what they did.

Pure. A rank that raises a diagnosis of the watchdog is often not the one that it is about: the others
waited for a rank that was late, and gave up. The texts are those of :mod:`zeroshard.watchdog.diagnosis`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TITLE = re.compile(r"\bRank(?:Late|Divergence|Frozen|Lost)(?: at step \d+)? after \d+ s \(.*\n")
_LATE = re.compile(
    r"No other call so far: (ranks? [\d, -]+) (?:is|are) slow|^RankLate: (ranks? [\d, -]+) did not",
    re.MULTILINE,
)
_DID = re.compile(
    r"\b([Rr]anks? [\d,-]+) ((?:went on after|skipped|read values of|reached) .*?)\.?$",
    re.MULTILINE,
)
_NOT_OVER = "Not ended; limit"


@dataclass(frozen=True, slots=True)
class Blame:
    """``ranks``: those that the diagnosis names. ``what``: what they did (``rank 1 <what>``)."""

    ranks: tuple[int, ...]
    what: str


def last_diagnosis(text: str) -> str:
    """The last diagnosis in ``text`` that ended the run, with what follows it; "": there is none."""
    titles = [*_TITLE.finditer(text)]
    verdict = text[titles[-1].start() :] if titles else ""
    return "" if _NOT_OVER in verdict else verdict


def blame_of(text: str) -> Blame | None:
    """What the last diagnosis in ``text`` says; None: there is none, or it presumes no rank the cause."""
    verdict = last_diagnosis(text) or text
    if _NOT_OVER in verdict:
        return None
    if found := _DID.search(verdict):
        return Blame(_ranks(found[1]), found[2])
    if found := _LATE.search(verdict):
        ranks = _ranks(found[1] or found[2])
        place = re.search(rf"^ *rank {ranks[0]}: (.*)$", verdict, re.MULTILINE)
        what = "was late" if len(ranks) == 1 else "were late"
        if place is None:
            return Blame(ranks, what)
        where = " < ".join(
            place[1].split(" < ")[:2]
        )  # the program's line and the one that called it
        return Blame(ranks, f"{what}, and the others gave up: {where}")
    return None


def _ranks(words: str) -> tuple[int, ...]:
    """The ranks of ``ranks 0-2,5``."""
    spans = [span.split("-") for span in re.findall(r"\d+(?:-\d+)?", words)]
    return tuple(
        rank for first, *last in spans for rank in range(int(first), int((last or [first])[0]) + 1)
    )
