"""Why do the ranks not get on: who called something else, who is gone, who is late?

Pure: judges what witnesses say and writes the five lines that people read. W ranks, each with the
last records of its history; nothing here waits, reads a clock or touches a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from zeroshard.core.flight import Flight, Record, rank_ranges

COLUMNS = 200
READ = ", read"
"""Ends the name of a gathering for a program that reads values, which no module asked for."""
FOR_ALL = ", for all ranks"
"""Ends the name of a section that goes on only when every rank has come to it."""
_WORDS = {"all_gather": "gather", "reduce_scatter": "reduce", "gather_small": "exchange"}


@dataclass(frozen=True)
class Witness:
    """What is known of one rank when a stall is looked into.

    ``fate``: ``runs``; ``left`` (closed its engine); ``gone`` (its process ended); ``stopped`` (by
    a signal or a disk); ``silent`` (its interpreter does not run). ``detail`` says it in words.
    ``stack``: where the main thread is, on one line; ``stacks``: all threads in full, for the file.
    """

    rank: int
    flight: Flight | None
    fate: str = "runs"
    detail: str = ""
    answered: bool = True
    blocked_s: float = 0.0
    stack: str = ""
    stacks: str = ""
    host: str = ""


@dataclass(frozen=True)
class Limits:
    """When a stall is looked into, reported and ended; seconds inside one collective."""

    first_report_s: float = 20.0
    frozen_s: float = 60.0
    stuck_s: float = 120.0
    timeout_s: float = 1800.0
    sections: Mapping[str, float] = field(default_factory=dict)

    def late_s(self, section: str) -> float:
        """How long a rank may stay in ``section`` while the others wait."""
        return self.sections.get(section, self.timeout_s)


@dataclass(frozen=True)
class Verdict:
    """``kind`` is the name of an error class; ``fatal``: it ends the run."""

    kind: str
    fatal: bool
    ranks: tuple[int, ...]
    text: str


class StallClock:
    """How long has the host been in one collective, and is it time to ask the others?"""

    def __init__(self, first_s: float) -> None:
        self.blocked_s = 0.0
        self._mark: Hashable = None
        self._since_s = 0.0
        self._first_s = first_s
        self._due_s = first_s

    def observe(self, now_s: float, mark: Hashable) -> bool:
        """``mark`` tells waits apart; None: not waiting. True when a round of questions is due.

        Rounds come every ``first_s`` and grow rarer to one in 15 s.
        """
        if mark is None or mark != self._mark:
            self._mark, self._since_s, self._due_s = mark, now_s, self._first_s
        self.blocked_s = now_s - self._since_s if mark is not None else 0.0
        if mark is None or self.blocked_s < self._due_s:
            return False
        self._due_s = self.blocked_s + min(15.0, max(self._first_s, self.blocked_s / 8))
        return True


class Difference(NamedTuple):
    """Where histories part: the calls at ``seq`` and who made them; ``agreed``: the one before."""

    seq: int
    calls: list[tuple[Record, list[int]]]
    agreed: Record | None
    exact: bool


def first_difference(witnesses: Iterable[Witness]) -> Difference | None:
    """The first collective that not all ranks called alike; None while histories agree.

    Not ``exact``: the histories differ already before everything that is still remembered.
    """
    # Ranks with the same newest record and the same hash have the same history: one speaks for all.
    alike: dict[tuple[int, int, int], tuple[dict[int, Record], list[int]]] = {}
    for witness in witnesses:
        records = witness.flight.records if witness.flight else ()
        if records:
            key = (records[-1].seq, records[-1].history, len(records))
            if key not in alike:
                alike[key] = ({r.seq: r for r in records}, [])
            alike[key][1].append(witness.rank)
    histories = list(alike.values())
    if len(histories) < 2:
        return None
    seqs: dict[int, int] = defaultdict(int)
    for by_seq, _ in histories:
        for seq in by_seq:
            seqs[seq] += 1
    agreed: Record | None = None
    for seq in sorted(seq for seq, count in seqs.items() if count > 1):
        present = [(by_seq[seq], ranks) for by_seq, ranks in histories if seq in by_seq]
        if len({(r.call, r.history) for r, _ in present}) == 1:
            agreed = present[0][0]
            continue
        calls: dict[Hashable, tuple[Record, list[int]]] = {}
        for record, ranks in present:
            key_ = record.call if len({r.call for r, _ in present}) > 1 else record.history
            calls.setdefault(key_, (record, []))[1].extend(ranks)
        groups = sorted(calls.values(), key=lambda g: (-len(g[1]), min(g[1])))
        exact = len({r.call for r, _ in groups}) > 1
        return Difference(seq, [(r, sorted(ranks)) for r, ranks in groups], agreed, exact)
    return None


def judge(
    witnesses: Sequence[Witness], limits: Limits, *, blocked_s: float, details: str = ""
) -> Verdict:
    """The verdict on what all witnesses say; ``blocked_s``: how long the asking rank waits."""
    case = _Case(witnesses, limits, blocked_s, details)
    difference = first_difference(witnesses)
    if difference is not None:
        return case.divergence(difference)
    for fates, verdict in (
        (("gone", "left"), case.lost),
        (("stopped", "silent"), case.frozen),
    ):
        found = [w for w in witnesses if w.fate in fates]
        if found:
            return verdict(found)
    late = [w for w in witnesses if w.flight is None or not w.flight.waiting]
    expecting = [w for w in late if w.flight and w.flight.section.endswith(FOR_ALL)]
    for witness in expecting:
        done = max((r.seq for r in _records(witness)), default=0)
        others = [w for w in witnesses if w.flight is not None and w.flight.waiting > done]
        if others:
            return case.parted(expecting, others)
    return case.late(late) if late else case.stuck()


@dataclass(frozen=True)
class _Case:
    witnesses: Sequence[Witness]
    limits: Limits
    blocked_s: float
    details: str

    def divergence(self, found: Difference) -> Verdict:
        groups = found.calls
        by_rank = {w.rank: w for w in self.witnesses}
        lines = []
        plain = len({(r.op, r.name) for r, _ in groups}) == len(groups)
        for record, ranks in groups[:2]:
            waiting = all(_waits_in(by_rank[r], found.seq) for r in ranks)
            what = call_text(record, sizes=not plain)
            lines.append(f"  {rank_ranges(ranks)}: {'waiting in' if waiting else 'called'} {what}")
        if len(groups) > 2:
            rest = [r for _, ranks in groups[2:] for r in ranks]
            lines[-1] += f"; other calls: {rank_ranges(rest)}"
        agreed = f"last agreed: {call_text(found.agreed)}. " if found.agreed else ""
        odd = sorted(r for _, ranks in groups[1:] for r in ranks)
        # With two groups of one size nobody is presumed right.
        tied = len(groups[0][1]) == len(groups[1][1])
        if not found.exact:
            cause = "The histories differ before the oldest call that is still remembered."
            fix = 'Set a larger "trust": {"ring": ...} to keep the first difference.'
        else:
            cause, fix = self._cause(found, by_rank)
        lines += [f"  {agreed}{cause}", f"  {fix}"]
        ranks = sorted(by_rank) if tied else odd
        return self._verdict("RankDivergence", True, ranks, lines)

    def _cause(self, found: Difference, by_rank: Mapping[int, Witness]) -> tuple[str, str]:
        (first, many), (second, few) = found.calls[:2]
        for record, ranks in found.calls[:2]:
            if record.name.endswith(READ):
                return (
                    f"{_cap(rank_ranges(ranks))} read values of {record.name.removesuffix(READ)!r} alone"
                    f"{_at(by_rank[ranks[0]])}.",
                    "Fix: read them on every rank; all have to give their parts.",
                )
        if (first.op, first.name) == (second.op, second.name):
            return (
                "Same call, other buffers.",
                "Fix: build the same model with the same dtypes on every rank.",
            )
        # Who skipped, and what: the one whose call the other side makes later or has made before.
        for skipped, comes, who, whole in (
            (first, second, few, many),
            (second, first, many, few),
        ):
            if _follows(by_rank[whole[0]], skipped, comes, found.seq):
                swapped = any(
                    r.seq > found.seq and r.call == skipped.call for r in _records(by_rank[who[0]])
                )
                if swapped:
                    return (
                        f"{_cap(rank_ranges(who))} came to {skipped.name!r} later.",
                        "Fix: run the modules in the same order on every rank.",
                    )
                module = skipped.name.partition("#")[0]
                return (
                    f"{_cap(rank_ranges(who))} skipped {skipped.name!r}{_at(by_rank[who[0]])}.",
                    f'Fix: "conditional_modules": ["{module}"], or let every rank run it.',
                )
        return (
            "The ranks took different branches" + _at(by_rank[few[0]]) + ".",
            "Fix: run the same modules in the same order on every rank.",
        )

    def parted(self, expecting: list[Witness], others: list[Witness]) -> Verdict:
        """Some wait for all outside collectives, and some of those they wait for in one of theirs."""
        section = _section(expecting[0])
        lines = [
            f"  {rank_ranges(w.rank for w in expecting)}: in {section}, waiting for all ranks"
            f"{_at(expecting[0])}",
            *self._waits(others)[:1],
            f"  Neither can go on: {rank_ranges(w.rank for w in others)} did not make that call.",
            "  Fix: make that call on every rank, not on one alone; each writes or reads its own part.",
        ]
        return self._verdict("RankDivergence", True, [w.rank for w in expecting], lines)

    def lost(self, lost: list[Witness]) -> Verdict:
        gone = [w for w in lost if w.fate == "gone"] or lost
        first = gone[0]
        what = first.detail or "its process ended"
        lines = [f"  {rank_ranges([first.rank])}{_host(first)}: {what}{_last(first)}"]
        if len(gone) > 1:
            lines.append(f"  also: {rank_ranges(w.rank for w in gone[1:])}")
        else:
            lines += self._waits(w for w in self.witnesses if w not in lost)[:1]
        lines.append(
            f"  The cause is in the output of {rank_ranges([first.rank])}; "
            "the others only lost their partner."
        )
        return self._verdict("RankLost", True, [w.rank for w in gone], lines)

    def frozen(self, frozen: list[Witness]) -> Verdict:
        # A little early, so that the run has ended when the limit is reached.
        fatal = self.blocked_s >= 0.9 * self.limits.frozen_s
        lines = [
            f"  {rank_ranges([w.rank])}{_host(w)}: {w.detail or 'does not answer'}{_last(w)}"
            for w in frozen[:2]
        ]
        if len(frozen) > 2:
            lines[-1] += f"; also {rank_ranges(w.rank for w in frozen[2:])}"
        lines += self._waits(w for w in self.witnesses if w not in frozen)[:1]
        if not fatal:
            lines.append(f"  Not ended; limit {self.limits.frozen_s:.0f} s (trust.frozen_s).")
        return self._verdict("RankFrozen", fatal, [w.rank for w in frozen], lines)

    def late(self, late: list[Witness]) -> Verdict:
        limit = max(self.limits.late_s(_section(w)) for w in late)
        fatal = self.blocked_s >= limit
        lines = self._waits(w for w in self.witnesses if w not in late)[:1]
        for witness in late[:2]:
            section = f"section {_section(witness)}: " if _section(witness) else ""
            where = witness.stack or "no stack"
            lines.append(f"  rank {witness.rank}: outside collectives, {section}{where}")
        if len(late) > 2:
            lines[-1] += f"; also {rank_ranges(w.rank for w in late[2:])}"
        lines.append(
            "  Same collectives on all ranks so far: a slow rank, not a divergence."
            + ("" if fatal else f" Not ended; limit {limit:.0f} s.")
        )
        return self._verdict("RankLate", fatal, [w.rank for w in late], lines)

    def stuck(self) -> Verdict:
        fatal = self.blocked_s >= self.limits.stuck_s
        lines = self._waits(self.witnesses)[:2]
        lines.append("  Same calls everywhere: the link between the ranks is the cause.")
        if not fatal:
            lines.append(f"  Not ended; limit {self.limits.stuck_s:.0f} s.")
        return self._verdict("TransportStuck", fatal, [w.rank for w in self.witnesses], lines)

    def _waits(self, witnesses: Iterable[Witness]) -> list[str]:
        """One line per group of ranks in the same place, the largest first."""
        groups: dict[str, list[int]] = defaultdict(list)
        for witness in witnesses:
            groups[_place(witness)].append(witness.rank)
        ordered = sorted(groups.items(), key=lambda g: (-len(g[1]), g[1]))
        return [f"  {rank_ranges(ranks)}: {place}" for place, ranks in ordered]

    def _verdict(self, kind: str, fatal: bool, ranks: Iterable[int], lines: list[str]) -> Verdict:
        step = max((w.flight.step for w in self.witnesses if w.flight), default=0)
        answered = sum(w.answered for w in self.witnesses)
        details = f"; details: {self.details}" if self.details else ""
        title = (
            f"{kind} at step {step} after {self.blocked_s:.0f} s "
            f"({answered} of {len(self.witnesses)} ranks answered{details})"
        )
        text = "\n".join(cut(line) for line in [title, *lines][:5])
        return Verdict(kind, fatal, tuple(sorted(ranks)), text)


def call_text(record: Record, *, sizes: bool = False) -> str:
    """A record as people read it: ``gather 'layers.0' (#19)``."""
    op, _, rest = record.op.partition(" ")
    what = f"{_WORDS.get(op, op)}{' ' + rest if rest else ''} {record.name!r} (#{record.seq})"
    return f"{what} of {record.nbytes} bytes {record.dtype}" if sizes else what


def cut(line: str) -> str:
    """At most 200 columns."""
    return line if len(line) <= COLUMNS else line[: COLUMNS - 3] + "..."


def _records(witness: Witness) -> tuple[Record, ...]:
    return witness.flight.records if witness.flight else ()


def _waits_in(witness: Witness, seq: int) -> bool:
    return witness.flight is not None and witness.flight.waiting == seq


def _follows(witness: Witness, first: Record, then: Record, seq: int) -> bool:
    """Whether this rank calls ``then`` after ``first``: from ``seq`` on, or in an earlier round."""
    records = _records(witness)
    if any(r.seq > seq and r.call == then.call for r in records):
        return True
    return any(
        a.seq < seq and a.call == first.call and b.call == then.call for a, b in pairwise(records)
    )


def _place(witness: Witness) -> str:
    flight = witness.flight
    if flight is None:
        return "nothing is known"
    waiting = next((r for r in flight.records if r.seq == flight.waiting), None)
    if waiting is not None:
        return f"waiting in {call_text(waiting)}"
    if not flight.records:
        return "before the first collective"
    return f"after {call_text(flight.records[-1])}"


def _last(witness: Witness) -> str:
    records = _records(witness)
    return f"; its last call was {call_text(records[-1])}" if records else ""


def _section(witness: Witness) -> str:
    return witness.flight.section.removesuffix(FOR_ALL) if witness.flight else ""


def _at(witness: Witness) -> str:
    return f" ({witness.stack.split(' < ')[0]})" if witness.stack else ""


def _host(witness: Witness) -> str:
    return f" ({witness.host})" if witness.host else ""


def _cap(text: str) -> str:
    return text[0].upper() + text[1:]
