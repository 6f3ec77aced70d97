"""Diagnoses stalled collectives: mismatched calls, dead, frozen and late ranks, stuck transports.

Pure functions: they make a diagnosis from the statuses of all ranks. Its text has at most five lines.
Nothing here waits, reads a clock or touches a process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zeroshard import errors
from zeroshard.core.texts import rank_ranges
from zeroshard.run.recordings import Record
from zeroshard.watchdog.rank_status import (
    READ,
    RankStatus,
    Wait,
    call_text,
    capitalized,
    conditional,
    cut,
    doing_of,
    host_of,
    last_call,
    line_of,
    place_of,
    records_of,
    section_of,
    what_follows,
    whereabouts,
)
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stacks import TORCH

_CAUGHT = "let such an error end the program, or catch it on every rank"
SET_UPS = "set-ups"
"""Label of the sequence of set-ups of engines and models."""


@dataclass(frozen=True)
class Diagnosis:
    """``kind``: the name of an error class. ``ranks``: those it names. ``fatal``: it ends the run.

    ``cause``: the ranks that are presumed the cause, and ``did``: what they did (``rank 1 <did>``), if it
    ends the run because of that.
    """

    kind: str
    fatal: bool
    ranks: tuple[int, ...]
    text: str
    cause: tuple[int, ...] = ()
    did: str = ""

    def error(self) -> errors.DistributedError:
        """The exception that a rank raises because of it."""
        kind: type[errors.DistributedError] = getattr(errors, self.kind, errors.DistributedError)
        error = kind(self.text)
        error.ranks, error.did = self.cause, self.did
        return error


def diagnosis_of_values(values: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of the values that :func:`dataclasses.asdict` gave, after their way through JSON."""
    ranks = {name: tuple(values.get(name, ())) for name in ("ranks", "cause")}
    return Diagnosis(**{**values, **ranks})


class Difference(NamedTuple):
    """Where histories begin to differ: the calls at ``seq`` and their ranks; ``agreed``: the one before.

    ``exact``: the calls at ``seq`` differ, and not only what was before them.
    """

    seq: int
    calls: list[tuple[Record, list[int]]]
    agreed: Record | None
    exact: bool


def first_difference(statuses: Iterable[RankStatus]) -> Difference | None:
    """The first collective that not all ranks called alike; None if the histories agree.

    The result is not ``exact`` if the histories differ before the oldest record that is kept.
    """
    histories = _histories(statuses)
    counts = Counter(seq for by_seq, _ in histories for seq in by_seq)
    agreed: Record | None = None
    for seq in sorted(seq for seq, count in counts.items() if count > 1):
        present = [(by_seq[seq], ranks) for by_seq, ranks in histories if seq in by_seq]
        if len({(r.call, r.history) for r, _ in present}) == 1:
            agreed = present[0][0]
            continue
        exact = len({r.call for r, _ in present}) > 1
        calls: dict[Hashable, tuple[Record, list[int]]] = {}
        for record, ranks in present:
            key = record.call if exact else record.history
            calls.setdefault(key, (record, []))[1].extend(ranks)
        groups = sorted(calls.values(), key=lambda g: (-len(g[1]), min(g[1])))
        return Difference(seq, [(r, sorted(ranks)) for r, ranks in groups], agreed, exact)
    return None


def _histories(statuses: Iterable[RankStatus]) -> list[tuple[dict[int, Record], list[int]]]:
    """The different histories, by number of the call, and the ranks of each.

    Ranks with the same newest record and the same hash have the same history.
    """
    alike: dict[tuple[int, int, int], tuple[dict[int, Record], list[int]]] = {}
    for status in statuses:
        if records := records_of(status):
            key = (records[-1].seq, records[-1].history, len(records))
            if key not in alike:
                alike[key] = ({r.seq: r for r in records}, [])
            alike[key][1].append(status.rank)
    return list(alike.values())


def diagnose(
    statuses: Sequence[RankStatus],
    limits: WatchdogSettings,
    *,
    blocked_s: float,
    details: str = "",
    label: str = "",
) -> Diagnosis:
    """The diagnosis of a stall in the sequence ``label``, from the statuses of all ranks.

    ``limits``: when a stall is reported and when it ends the run. ``blocked_s``: how long the asking rank
    has waited. ``details``: path of the file with the evidence.
    """
    case = _Case(statuses, limits, blocked_s, details, label)
    difference = first_difference(statuses)
    if difference is not None:
        return case.divergence(difference)
    for fate, diagnosis in (
        ("gone", case.lost),
        ("stopped", case.frozen),  # before the ranks that left because of it
        ("waits", case.frozen),
        ("left", case.lost),
        ("silent", case.frozen),
    ):
        found = [w for w in statuses if w.fate == fate]
        if found:
            return diagnosis(found)
    ring, late = _followed(statuses, label)
    if late and any(_is_torch(w) for w in ring):  # what such a call waits for is only presumed
        return case.late(late)
    if ring:
        return case.parted(ring)
    return case.late(late) if late else case.stuck()


def _followed(
    statuses: Sequence[RankStatus], label: str
) -> tuple[list[RankStatus], list[RankStatus]]:
    """Follows which rank waits for which, starting with the ranks that wait in ``label``.

    Returns the ranks of a ring of waits, and the ranks that others wait for and that are not blocked. A
    ring cannot end by itself: each rank waits for a call that another makes only after its own wait.
    """
    alike: dict[Wait | None, list[RankStatus]] = defaultdict(list)
    for status in statuses:
        alike[_blocked(status, label)].append(status)
    late: dict[int, RankStatus] = {}
    edges: dict[Wait, set[Wait]] = {}
    waits = [wait for wait in alike if wait is not None]
    open_ = [wait for wait in waits if wait.label == label] or waits
    while open_:
        wait = open_.pop()
        if wait in edges:
            continue
        edges[wait] = set()
        for other, debtors in _debtors(wait, alike, label).items():
            # Behind the program, the other ranks make this call in another thread as well.
            if other is None or wait.behind:
                late |= {w.rank: w for w in debtors}
            else:
                edges[wait].add(other)
        open_ += edges[wait]
    parted = [w for wait in _ring(edges) for w in alike[wait]]
    return sorted(parted, key=lambda w: w.rank), sorted(late.values(), key=lambda w: w.rank)


def _debtors(
    wait: Wait, alike: Mapping[Wait | None, Sequence[RankStatus]], label: str
) -> dict[Wait | None, list[RankStatus]]:
    """The ranks that ``wait`` needs, by what they are blocked in themselves."""
    owing = {own: [w for w in ranks if _owes(w, wait, own, label)] for own, ranks in alike.items()}
    return {own: ranks for own, ranks in owing.items() if ranks}


def _ring(edges: Mapping[Wait, set[Wait]]) -> set[Wait]:
    """The waits that others of them lead to, and that lead to others of them."""
    ring, kept = set[Wait](), set(edges)
    while kept != ring:
        ring = kept
        led = {other for wait in ring for other in edges[wait]}
        kept = {wait for wait in ring if edges[wait] & ring and wait in led}
    return ring


def _owes(status: RankStatus, wait: Wait, own: Wait | None, label: str) -> bool:
    """Whether ``wait`` needs a call that the rank of ``status``, blocked in ``own``, has not made yet."""
    if wait.source not in (None, status.rank) or wait == own:
        return False
    if wait.members and status.rank not in wait.members:
        return False
    if wait.label == TORCH:
        return own is None or own.label != TORCH
    flight = status.flight
    known = flight.seq if flight is not None and wait.label == label else 0
    return status.reached.get(wait.label, known) < wait.seq


def _is_torch(status: RankStatus) -> bool:
    return status.wait is not None and status.wait.label == TORCH


def _blocked(status: RankStatus, label: str) -> Wait | None:
    """What a rank is blocked in: as it answered, or as its recording shows."""
    flight = status.flight
    if status.wait is not None or flight is None or not flight.waiting:
        return status.wait
    return Wait(label, flight.waiting, place_of(status), collective=True)


def _in_collective(status: RankStatus, label: str) -> bool:
    """Whether the rank waits in a collective of an engine, or in nothing."""
    wait = _blocked(status, label)
    return wait is None or wait.collective


@dataclass(frozen=True)
class _Case:
    statuses: Sequence[RankStatus]
    limits: WatchdogSettings
    blocked_s: float
    details: str
    label: str

    def divergence(self, found: Difference) -> Diagnosis:
        groups = found.calls
        by_rank = {w.rank: w for w in self.statuses}
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
        # With two groups of equal size, neither is presumed right.
        tied = len(groups[0][1]) == len(groups[1][1])
        who: Sequence[int] = ()
        did = ""
        if not found.exact:
            cause = "The histories differ before the oldest call that is still remembered."
            fix = 'Set a larger "trust": {"ring": ...} to keep the first difference.'
        else:
            who, did, fix = self._cause(found, by_rank)
            cause = f"{capitalized(rank_ranges(who))} {did}." if who else did
        lines += [f"  {agreed}{cause}", f"  {fix}"]
        ranks = sorted(by_rank) if tied else odd
        return self._diagnosis("RankDivergence", True, ranks, lines, who, did)

    def _cause(
        self, found: Difference, by_rank: Mapping[int, RankStatus]
    ) -> tuple[Sequence[int], str, str]:
        """The ranks that are the cause, what they did, and what helps; no ranks: what is different."""
        (first, many), (second, few) = found.calls[:2]
        if went_on := [w for w in self.statuses if w.failed]:
            ranks = [w.rank for w in went_on]
            return ranks, f"went on after {went_on[0].failed}", f"Fix: {_CAUGHT}."
        for record, ranks in found.calls[:2]:
            if record.name.endswith(READ):
                return (
                    ranks,
                    f"read values of {record.name.removesuffix(READ)!r} alone"
                    + line_of(by_rank[ranks[0]]),
                    "Fix: read them on every rank; every rank must send its part.",
                )
        if (first.op, first.name) == (second.op, second.name):
            return (
                (),
                "Same call, other buffers.",
                "Fix: build the same model with the same dtypes on every rank.",
            )
        # A side skipped a call if the other side makes both calls in this order, now or earlier.
        for skipped, comes, who, whole in (
            (first, second, few, many),
            (second, first, many, few),
        ):
            if what_follows(by_rank[whole[0]], skipped, comes, found.seq):
                swapped = any(
                    r.seq > found.seq and r.call == skipped.call
                    for r in records_of(by_rank[who[0]])
                )
                if swapped:
                    return (
                        who,
                        f"reached {skipped.name!r} later",
                        "Fix: run the modules in the same order on every rank.",
                    )
                # Only units are gathered; the layers of a tensor group are no units.
                may = f"{conditional(skipped)}, or " if skipped.op == "all_gather" else ""
                return (
                    who,
                    f"skipped {skipped.name!r}{line_of(by_rank[who[0]])}",
                    f"Fix: {may}let every rank run it.",
                )
        fix = "Fix: run the same modules in the same order on every rank"
        if first.op == second.op == "all_gather":
            fix += f"; for those skipped by chance (LayerDrop): {conditional(first, second)}"
        return (), "The ranks took different branches" + line_of(by_rank[few[0]]) + ".", fix + "."

    def parted(self, ring: list[RankStatus]) -> Diagnosis:
        """A ring: each of these ranks waits for a call that another makes only after its own wait."""
        # First the ranks that wait outside collectives: they more likely took the wrong branch.
        places = self._places(ring)
        places.sort(key=lambda group: _in_collective(group[1][0], self.label))
        others = [w.rank for _, group in places[1:] for w in group]
        # Of two groups of equal size, neither is presumed wrong.
        fewest = min(len(group) for _, group in places)
        odd = [group for _, group in places if len(group) == fewest]
        named = [w.rank for w in (odd[0] if len(odd) == 1 else ring)]
        # What the program's own call waits for is only presumed, so it gets more time.
        fatal = not any(map(_is_torch, ring)) or (
            min(w.blocked_s for w in ring) >= 0.9 * self.limits.stuck_s
        )
        missing = rank_ranges(others)
        lines = [
            *(self._line(place, group) for place, group in places[:2]),
            f"  Neither can continue: {missing} did not make that call."
            if fatal
            else f"  Not ended: {missing} may still make that call; limit {self.limits.stuck_s:.0f} s.",
            "  Fix: make that call on every rank, not on one alone; every rank must send its part.",
        ]
        return self._diagnosis("RankDivergence", fatal, named, lines)

    def lost(self, lost: list[RankStatus]) -> Diagnosis:
        first = lost[0]
        what = first.detail or "its process ended"
        lines = [f"  {rank_ranges([first.rank])}{host_of(first)}: {what}{last_call(first)}"]
        if len(lost) > 1:
            lines.append(f"  also: {rank_ranges(w.rank for w in lost[1:])}")
        else:
            lines += self._waits(self._without(lost))[:1]
        name = rank_ranges([first.rank])
        lines.append(
            f"  The cause is in the output of {name}; the others only lost their connection to it."
        )
        if what.endswith((errors.ENDED, errors.CLOSED)):
            lines.append(
                f"  If there is no error, {name} made fewer steps: look for a data loader that is "
                "shorter there, or for sys.exit()."
            )
        return self._diagnosis("RankLost", True, [w.rank for w in lost], lines)

    def frozen(self, frozen: list[RankStatus]) -> Diagnosis:
        # A rank that was late for long may be frozen since a moment ago.
        stood_s = max(self.blocked_s if w.frozen_s is None else w.frozen_s for w in frozen)
        fatal = min(stood_s, self.blocked_s) >= self.limits.frozen_verdict_s
        lines = [
            f"  {rank_ranges([w.rank])}{host_of(w)}: {w.detail or 'does not answer'}{last_call(w)}"
            for w in frozen[:2]
        ]
        if len(frozen) > 2:
            lines[-1] += f"; also {rank_ranges(w.rank for w in frozen[2:])}"
        lines += self._waits(self._without(frozen))[:1]
        if not fatal:
            lines.append(f"  Not ended; limit {self.limits.frozen_s:.0f} s (trust.frozen_s).")
        return self._diagnosis("RankFrozen", fatal, [w.rank for w in frozen], lines)

    def late(self, late: list[RankStatus]) -> Diagnosis:
        ranks = [w.rank for w in late]
        waiting = self._without(late)
        section = self._longest_section(late) or self._longest_section(waiting)
        limit = self.limits.late_s(section)
        fatal = self.blocked_s >= limit
        lines = self._waits(waiting)[:1]
        lines += [f"  rank {status.rank}: {whereabouts(status)}" for status in late[:2]]
        if len(late) > 2:
            lines[-1] = cut(lines[-1], 160) + f"; also {rank_ranges(ranks[2:])}"
        went_on = [w.rank for w in late if w.failed]
        key = self.limits.key(section)
        ended = f", or allow more than {limit:g} s ({key})." if key else f" within {limit:g} s."
        going = f"Not ended; limit {limit:g} s{f' ({key})' if key else ''}."
        if went_on:
            did = "went on after an error that the others did not have"
            then = f"Fix: {_CAUGHT}{ended}" if fatal else going
            lines.append(f"  {capitalized(rank_ranges(went_on))} {did}. {then}")
        else:
            was, are = ("was", "is") if len(late) == 1 else ("were", "are")
            line_and_caller = " < ".join(whereabouts(late[0]).split(" < ")[:2])
            did = f"{was} late, and the others gave up: {line_and_caller}"
            rest = "Fix: make this call on every rank" + ended
            lines.append(
                f"  No other call so far: {rank_ranges(ranks)} {are} slow, or will not "
                f"make this call. {rest if fatal else f'Every rank has to make this call. {going}'}"
            )
        done = (went_on or ranks, did) if fatal else ((), "")
        return self._diagnosis("RankLate", fatal, ranks, lines, *done)

    def _longest_section(self, statuses: Iterable[RankStatus]) -> str:
        """The section with the longest limit that one of these ranks is in; "": none is in one."""
        return max(set(map(section_of, statuses)) - {""}, key=self.limits.late_s, default="")

    def stuck(self) -> Diagnosis:
        fatal = self.blocked_s >= self.limits.stuck_s
        lines = self._waits(self.statuses)[:2]
        lines.append("  Same calls everywhere: the link between the ranks is the cause.")
        if not fatal:
            lines.append(f"  Not ended; limit {self.limits.stuck_s:.0f} s.")
        return self._diagnosis("TransportStuck", fatal, [w.rank for w in self.statuses], lines)

    def _without(self, some: Iterable[RankStatus]) -> list[RankStatus]:
        """The others. Statuses are not compared: each has all records of its rank."""
        ranks = {status.rank for status in some}
        return [status for status in self.statuses if status.rank not in ranks]

    def _waits(self, statuses: Iterable[RankStatus]) -> list[str]:
        """One line per group of ranks in the same place, the largest first."""
        return [self._line(place, group) for place, group in self._places(statuses)]

    def _places(self, statuses: Iterable[RankStatus]) -> list[tuple[str, list[RankStatus]]]:
        groups: dict[str, list[RankStatus]] = defaultdict(list)
        for status in statuses:
            groups[place_of(status)].append(status)
        return sorted(groups.items(), key=lambda g: (-len(g[1]), g[1][0].rank))

    def _line(self, place: str, group: Sequence[RankStatus]) -> str:
        """Where a group of ranks is, with the program's line of the first of them."""
        doing = doing_of(group[0])
        doing = f" in {doing}" if doing and not place.endswith(f" {doing}") else ""
        return f"  {rank_ranges(w.rank for w in group)}: {place}{doing}{line_of(group[0])}"

    def _diagnosis(
        self, kind: str, fatal: bool, ranks: Iterable[int], lines: list[str],
        cause: Iterable[int] = (), did: str = "",
    ) -> Diagnosis:  # fmt: skip
        steps = [w.flight.step for w in self.statuses if w.flight]
        when = f" at step {max(steps)}" if steps else ""
        answered = sum(w.answered for w in self.statuses)
        details = f"; details: {self.details}" if self.details else ""
        title = (
            f"{kind}{when} after {self.blocked_s:.0f} s "
            f"({answered} of {len(self.statuses)} ranks answered{details})"
        )
        text = "\n".join(cut(line) for line in [title, *lines][:5])
        cause = tuple(sorted(cause))
        return Diagnosis(kind, fatal, tuple(sorted(ranks)), text, cause, did if cause else "")


def _waits_in(status: RankStatus, seq: int) -> bool:
    return status.flight is not None and status.flight.waiting == seq
