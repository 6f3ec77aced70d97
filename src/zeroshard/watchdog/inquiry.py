"""Asks all ranks what they do, makes a diagnosis of the answers, and reports it.

Runs in the watchdog's thread of the rank that is elected to ask. Without the store, each rank judges by
what its own host shows.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zeroshard.comm.host import Process, times_run
from zeroshard.core.files import write_for_this_user
from zeroshard.errors import CLOSED, ENDED
from zeroshard.run.run_folder import run_folder
from zeroshard.watchdog.diagnosis import Diagnosis, diagnose
from zeroshard.watchdog.messages import Messages
from zeroshard.watchdog.rank_status import (
    RankStatus,
    Wait,
    status_from_answer,
    status_from_host,
    with_stack,
    without_connection,
)
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stacks import TORCH, phase, stack_line, stacks
from zeroshard.watchdog.tracked_calls import TrackedCalls

POLL_S = 0.02
_FROZEN = frozenset({"stopped", "waits", "silent"})
"""Fates of ranks that run no Python."""
_NOT_HERE = "has not reached ZeroShard yet: no initialize, no zero.Init. Look at its output"
_IDLE = "does not use ZeroShard now; its engine and its models are closed. Look at its output"


@dataclass
class _Standstill:
    """A rank that was seen frozen: since when at most, when it was last seen, and how often it had run.

    ``runs``: of :func:`~zeroshard.comm.host.times_run`; None: another rank saw it.
    """

    since_s: float
    seen_s: float
    runs: int | None


@dataclass(eq=False)
class Inquiry:
    """The questions that the watchdog of ``rank`` asks the ``ranks``.

    ``here``: this rank's process. ``stop``: set when the watchdog is to end, so that no answer is waited
    for. ``own`` in the methods: what this rank answers itself.
    """

    rank: int
    ranks: Sequence[int]
    here: Process
    messages: Messages
    stop: threading.Event
    _standing: dict[int, _Standstill] = field(default_factory=dict)
    _answered_s: dict[int, float] = field(default_factory=dict)  # when a rank was last seen to run

    def ask(
        self,
        number: int,
        calls: TrackedCalls,
        settings: WatchdogSettings,
        own: Mapping[str, Any],
    ) -> Diagnosis:
        """Ask question ``number``, about a stall in ``calls``; judge, report and publish.

        Waits up to five ticks for answers, with very many ranks longer.

        Raises:
            StoreLost: the store does not answer.
        """
        wait, asked_s = calls.wait(), time.monotonic()
        self.messages.ask(number, calls.label)
        statuses = self._collect(number, calls, settings, own)
        # A rank that has come while the others were asked may have ended its program since.
        over = wait is not None and not _same(wait, calls.wait())
        if over and not (calls.doubt or calls.suspects):
            diagnosis, reported = Diagnosis("RankLate", False, (), "The wait is over."), False
        else:
            if wait is not None:  # the answers took time, in which nothing else looked at the clock
                calls.clock.blocked_s += time.monotonic() - asked_s
            diagnosis, reported = self._judge(calls, statuses, settings)
        self.messages.publish(number, diagnosis, reported=reported)
        return diagnosis

    def judge_alone(
        self, calls: TrackedCalls, settings: WatchdogSettings, own: Mapping[str, Any]
    ) -> Diagnosis:
        """Judge by what this host shows, without the store."""
        seen = [status_from_answer(self.messages.peers[self.rank], own)]
        for rank in self.ranks:
            if rank != self.rank and (rank in calls.peers or rank in self.messages.peers):
                seen.append(status_from_host(self._known(rank, calls), self.here, asked=False))
        return self._judge(calls, sorted(seen, key=lambda status: status.rank), settings)[0]

    def note(self, diagnosis: Diagnosis, blocked_s: float) -> None:
        """Note which ranks another rank has seen frozen, and that all others ran.

        ``blocked_s``: how long this rank has waited in the calls that the question was about.
        """
        now_s = time.monotonic()
        frozen = set(diagnosis.ranks) if diagnosis.kind == "RankFrozen" else set()
        for rank in self.ranks:
            if rank in frozen:
                since_s = self._answered_s.get(rank, now_s - blocked_s)
                self._standing.setdefault(rank, _Standstill(since_s, now_s, None))
            else:
                self._standing.pop(rank, None)
                self._answered_s[rank] = now_s

    def _with_standstill(
        self, status: RankStatus, calls: TrackedCalls, begun_s: float, now_s: float
    ) -> RankStatus:
        """The status with :attr:`~.rank_status.RankStatus.frozen_s`. ``begun_s``: when this wait began.

        A rank that was late for an hour must not count as frozen for an hour when it is stopped then.
        """
        rank = status.rank
        known = self._standing.pop(rank, None)
        if status.fate not in _FROZEN:
            self._answered_s[rank] = now_s
            return status
        runs = times_run(self._known(rank, calls).process, self.here)
        if known is None:
            since_s = self._answered_s.get(rank, begun_s)
        elif status.fate == "stopped" and known.runs not in (None, runs):
            since_s = known.seen_s  # it has run since
        else:
            since_s = known.since_s
        since_s = max(since_s, begun_s)
        self._standing[rank] = _Standstill(since_s, now_s, runs)
        return replace(status, frozen_s=now_s - since_s)

    # -- statuses ----------------------------------------------------------------------------------

    def _collect(
        self,
        number: int,
        calls: TrackedCalls,
        settings: WatchdogSettings,
        own: Mapping[str, Any],
    ) -> list[RankStatus]:
        """The answers to question ``number``; for ranks that cannot answer, what this host knows."""
        size = len(self.ranks)
        found = {self.rank: status_from_answer(self.messages.peers[self.rank], own)}
        until = time.monotonic() + settings.answer_s(size)
        looked_s, taken = -1.0, 0  # when answers were read; how many
        while True:
            now_s = time.monotonic()
            over = now_s > until or self.stop.is_set()
            missing = [rank for rank in self.ranks if rank not in found]
            # Which ranks have answered costs several requests for each that has not, so that is asked
            # when all have, or as rarely as many ranks can be asked.
            complete = self.messages.count_answers(number) >= taken + len(missing)
            if over or complete or now_s - looked_s > size / 2048:
                looked_s = now_s
                answers = self.messages.answers_of(number, missing)
                taken += len(answers)
                for rank, answer in answers.items():
                    calls.suspects.update(answer["suspects"])
                    found[rank] = status_from_answer(self._known(rank, calls), answer)
                self._look_at_host(calls, found, over=over)
            if len(found) == size or over:
                return [found[rank] for rank in sorted(found)]
            time.sleep(max(POLL_S, size / 16384))

    def _look_at_host(
        self, calls: TrackedCalls, found: dict[int, RankStatus], *, over: bool
    ) -> None:
        """Add what this host knows of ranks that cannot answer; when it is over, of all without one."""
        missing = [rank for rank in self.ranks if rank not in found]
        cards = self.messages.read_cards(missing)
        whys = self.messages.leavers(calls.label, missing)
        for rank in missing:
            status = self._without_answer(rank, calls, cards.get(rank), whys.get(rank))
            if over:
                found[rank] = with_stack(status, self._known(rank, calls), self.here)
            elif status.fate not in ("runs", "waits", "silent"):
                found[rank] = status

    def _without_answer(
        self, rank: int, calls: TrackedCalls, card: tuple[Peer, str, str] | None, why: str | None
    ) -> RankStatus:
        """What is known of a rank. ``card``: its own; ``why``: it left the sequence ``calls``."""
        if card is None:
            return RankStatus(rank, None, fate="absent", detail=_NOT_HERE, answered=False)
        base, state, reason = card
        if state == "idle" and rank not in calls.peers and base.fate(self.here)[0] != "gone":
            return RankStatus(rank, None, fate="absent", detail=_IDLE, answered=False)
        status = status_from_host(self._known(rank, calls), self.here)
        if not calls.collective and status.flight is not None:
            # The file has the collectives: of another sequence only step and section are true.
            others = status.flight._replace(seq=0, waiting=0, records=())
            status = replace(status, flight=others)
        why = why or (reason if state == "left" else None)
        if why is not None and status.fate != "stopped":
            gone = status.fate == "gone" and state != "left"
            status = replace(
                status,
                fate="gone" if gone else "left",
                detail=why if why in (CLOSED, ENDED) else f"left: {why}",
            )
        return status

    def _known(self, rank: int, calls: TrackedCalls) -> Peer:
        """The rank's process, and the path of its recording of ``calls``."""
        peer = calls.peers.get(rank) or self.messages.peers.get(rank)
        return peer or Peer(rank, Process("", "", 0, ""), "")

    # -- the diagnosis -----------------------------------------------------------------------------

    def _judge(
        self, calls: TrackedCalls, statuses: list[RankStatus], settings: WatchdogSettings
    ) -> tuple[Diagnosis, bool]:
        """The diagnosis, and whether it was printed or written to a file."""
        suspects = calls.suspects
        statuses = [without_connection(w) if w.rank in suspects else w for w in statuses]
        same = [w.blocked_s for w in statuses if w.wait and w.wait.label == calls.label]
        now_s, blocked_s = time.monotonic(), max([calls.clock.blocked_s, *same])
        statuses = [self._with_standstill(w, calls, now_s - blocked_s, now_s) for w in statuses]
        path = self._dump_path(statuses, settings)
        diagnosis = diagnose(
            statuses,
            calls.settings,
            blocked_s=blocked_s,
            details=str(path),
            label=calls.label,
        )
        calls.doubt = False
        # A broken connection does not heal.
        diagnosis = replace(diagnosis, fatal=diagnosis.fatal or bool(suspects))
        return diagnosis, self._report(calls, diagnosis, statuses, path)

    def _report(
        self, calls: TrackedCalls, diagnosis: Diagnosis, statuses: list[RankStatus], path: Path
    ) -> bool:
        """Print a diagnosis that is not fatal when a report is due; write the full evidence to a file.

        False: it was too early for a report.
        """
        due = max(calls.report_due_s, calls.first_report_s())
        if not diagnosis.fatal and calls.clock.blocked_s < due:
            return False
        with contextlib.suppress(OSError):  # a full disk must not hide the diagnosis
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_for_this_user(path, _evidence(diagnosis, statuses))
        if not diagnosis.fatal:
            calls.report_due_s = calls.next_report_s()
            print(diagnosis.text, file=sys.stderr, flush=True)
        return True

    def _dump_path(self, statuses: Sequence[RankStatus], settings: WatchdogSettings) -> Path:
        step = max((w.flight.step for w in statuses if w.flight), default=0)
        return run_folder(settings.dump_dir) / f"hang-{step}-{self.here.pid}.json"


def _evidence(diagnosis: Diagnosis, statuses: Sequence[RankStatus]) -> str:
    """JSON with a line for each rank. All ranks wait for the verdict meanwhile, so nothing is copied."""
    lines = ",\n".join(json.dumps(vars(status)) for status in statuses)
    return f'{{"diagnosis": {json.dumps(asdict(diagnosis))},\n"statuses": [\n{lines}\n]}}\n'


def _same(wait: Wait, later: Wait | None) -> bool:
    return later is not None and (wait.label, wait.seq) == (later.label, later.seq)


def own_answer(
    parts: Sequence[TrackedCalls],
    calls: TrackedCalls | None,
    *,
    left: str | None,
    failed: str = "",
    main: int,
    keep: int,
    with_stacks: bool,
) -> dict[str, Any]:
    """What this rank answers to a question about ``calls``, as JSON values.

    ``calls`` is None if the rank does not take part in that sequence; ``left``: why it left it;
    ``failed``: what a call of its present step ended with. ``parts``: all sequences that it follows.
    ``main``: the program's thread. ``keep``: how many records to send.
    """
    waits = [wait for part in parts if (wait := part.wait()) is not None]
    flight = calls.flight() if calls is not None else None
    return {
        "flight": flight and flight._replace(records=flight.records[-keep:]),
        "left": left,
        "failed": failed,
        "blocked_s": max(part.clock.blocked_s for part in parts),
        "suspects": sorted(calls.suspects) if calls is not None else [],
        "stack": stack_line(main) if with_stacks else "",
        "stacks": stacks() if with_stacks else "",
        "phase": phase(main),
        "wait": next((w for w in waits if not w.behind), None),
        "reached": {part.label: part.reached() for part in parts if part.label != TORCH},
    }
