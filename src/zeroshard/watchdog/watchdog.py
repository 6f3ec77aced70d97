"""The watchdog thread: notices that ranks no longer work together and reports the cause on every rank.

[Note: watchdog] The decision: docs/decisions/0003-tagged-transport.md.

Vocabulary. A process has one watchdog for each set of ranks that it joined (:mod:`~.startup`), from the
first contact with ZeroShard on. The watchdog *follows* sequences of calls that all ranks take part in
(:mod:`~.tracked_calls`): the collectives of each engine, its control group, set-ups, and what the program
itself calls of ``torch.distributed``. When the host has been inside one call for too long, or a
connection broke, one elected rank asks all others through the store, makes a *diagnosis* of their answers
(:mod:`~.diagnosis`) and publishes it. A *fatal* diagnosis ends the run.

Watchdogs need no agreement with each other: each posts a *card* in the store that says which process it
watches and in which state (``on``, ``idle`` or ``left``). One may begin or end at any time.

Which thread may do what:

* The main thread runs the program. It is the only one that calls collectives and waits for them. It calls
  :meth:`Watchdog.set_up`, :meth:`~Watchdog.follow` and :meth:`~Watchdog.leave`, and it raises: ``check``,
  ``explain`` and ``settle`` return or raise the diagnosis. A thread that saves in the background may call
  ``check`` too.
* The watchdog's thread runs :meth:`Watchdog.tick`, and only that. It reads recorders and Python frames,
  asks, answers and judges. It never waits for a collective and never raises into the program. For a fatal
  diagnosis it sets ``_State.diagnosis``, then the event ``ready``, then calls the ``wakers``, which shut
  down the sockets or waits that the main thread is blocked in. The transport error that this causes is
  replaced by the diagnosis.
* The store client's thread (:mod:`~.store_client`) is the only one that touches the watchdog's store
  client. Both other threads use it through :meth:`Watchdog._call`, with a deadline.
* A timer of the fault handler, which needs no interpreter lock, writes the stacks of this process if the
  watchdog's thread does not put it off in time (:class:`~.rank_status.FrozenStack`).

Invariants, and what breaks without them:

* A process has at most one watchdog over the same ranks (``watchdog_of`` in :mod:`~.startup`). Answers in
  the store have a key per rank, so two watchdogs of one process would overwrite each other's answers.
* ``diagnosis`` is set once and never changed. So all threads of a rank report the same one.
* A fatal diagnosis is raised, or else the process ends with exit code 75 after ``grace_s`` seconds
  (:meth:`Watchdog._enforce`). Otherwise a main thread that nothing can wake would hang.
* A rank that raises stays for up to 1.5 s until the others have read the diagnosis, because its process
  may serve the store. Otherwise the others would only see that the store is gone.
* No call to the store lacks a deadline, since a store whose server is frozen never answers. If the store
  is lost, the watchdog judges by what its own host shows (:meth:`Watchdog._judge_alone`).
* The thread holds the watchdog by a weak reference between two looks. Otherwise the watchdog of an
  engine that the program dropped without closing it would never end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zeroshard import errors
from zeroshard.comm.collectives import lost_text
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.host import Process, this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.watchdog.diagnosis import MEETINGS, TORCH, Diagnosis, RankStatus, call_text, diagnose
from zeroshard.watchdog.lone_reads import LoneReadCheck, Position
from zeroshard.watchdog.rank_status import (
    FrozenStack,
    Peer,
    call_of_torch,
    phase,
    stack_line,
    stacks,
    status_from_answer,
    status_from_host,
    without_connection,
)
from zeroshard.watchdog.store_client import (
    StoreClient,
    StoreLost,
    look,
    read_verdict,
    write_verdict,
)
from zeroshard.watchdog.tracked_calls import CallsOfTorch, SetUps, TrackedCalls, calls_of_torch

if TYPE_CHECKING:
    from zeroshard.comm.agreement import Store
    from zeroshard.comm.recorder import Item
    from zeroshard.watchdog.settings import WatchdogSettings

EXIT_VERDICT = 75
#: How long a main thread with a broken connection waits for the diagnosis.
_EXPLAIN_S = 8.0
#: How long it then stays so that the others can read the diagnosis: this process may serve the store.
_LINGER_S = 1.5
_POLL_S = 0.02
#: Longest pause between looks while nothing is followed: the process group may end.
_IDLE_TICK_S = 0.25
_NOT_HERE = "has not come to ZeroShard yet: no initialize, no zero.Init. Look at its output"
_IDLE = "runs nothing of ZeroShard now; its engine and its models are closed. Look at its output"


@dataclass
class _State:
    """What the watchdog's thread and the main thread share.

    ``diagnosis`` is set once, before ``ready``; ``delivered``: the main thread raises it. ``kick`` asks
    for a look at once, ``stop`` ends the thread.
    """

    diagnosis: Diagnosis | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    delivered: threading.Event = field(default_factory=threading.Event)
    kick: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class Watchdog:
    """Watches ``ranks`` (global ranks), of which this process is ``rank``.

    ``store``: a client that nothing else uses, with a key space that these ranks share. ``recording``:
    path of a file that exists as long as this process watches; the recordings of its sessions are in
    the same directory. ``store_rank``: the rank whose process serves the store, or None. ``over()``:
    whether the process group is gone, and with it all that could be watched. ``hung_up()``: whether the
    server of the store has closed its connection.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        ranks: Sequence[int],
        recording: Path,
        trust: WatchdogSettings,
        store_rank: int | None = None,
        over: Callable[[], bool] = lambda: False,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._here = this_process()
        self._trust = trust
        self._over = over
        self._hung_up = hung_up
        self._main = threading.get_ident()
        self._state = _State()
        self._set_ups = SetUps()
        self._sessions: weakref.WeakSet[SessionWatch] = weakref.WeakSet()
        self._always = [
            self._set_ups.followed(trust),
            CallsOfTorch(self._main).followed(trust),
        ]
        self._left: dict[str, str] = {}
        self._store_rank = store_rank if store_rank != rank else None
        self._frozen: FrozenStack | None = None
        self._elected_at_s: float | None = None
        self._deadline_s: float | None = None
        self._told = False
        self._presence = Recorder(
            "process", ring=2, recording=recording, rank=rank, world_size=len(ranks)
        )
        self._peers = {rank: Peer(rank, self._here, str(recording))}
        self._idle: set[int] = set()
        self._channel = StoreClient(store, name=f"zeroshard-side-{rank}")
        # A watchdog that is collected without being closed must not leave a thread.
        weakref.finalize(self, self._channel.end)
        times = self._call(lambda s: s.add(f"times/{rank}", 1))
        # A rank that starts its first watchdog still reads the diagnosis that ended the run. A rank that
        # starts another one reads only newer ones.
        self._since = self._answered = 0
        if times > 1:
            self._since = self._answered = self._call(lambda s: s.add("asked", 0))
        self._post_card("on")
        self._farewell = _close_at_exit(self)
        weakref.finalize(self, atexit.unregister, self._farewell)
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._state),
            name=f"zeroshard-sentinel-{rank}",
            daemon=True,
        )
        self._thread.start()

    @property
    def folder(self) -> Path:
        """The directory of this process's recordings."""
        return Path(self._peers[self._rank].recording).parent

    @property
    def usable(self) -> bool:
        """Whether it still watches: not closed, no diagnosis delivered, and the process group lives."""
        return (
            not self._state.stop.is_set()
            and not self._state.delivered.is_set()
            and not self._over()
        )

    # -- called by the main thread -----------------------------------------------------------------

    @contextlib.contextmanager
    def set_up(self, number: int, what: str, trust: WatchdogSettings) -> Iterator[None]:
        """A context for the ``number``-th set-up of these ranks, from 1. ``what``: the program's call."""
        self._main = threading.get_ident()
        self._trust = trust
        self._always = [self._set_ups.followed(trust), CallsOfTorch(self._main).followed(trust)]
        with self._set_ups.begin(number, what):
            yield

    def follow(self, session_watch: SessionWatch) -> None:
        """Follow the sequences of ``session_watch`` too, from now on."""
        if self._frozen is None and session_watch.trust.stacks:
            self._frozen = FrozenStack(self._peers[self._rank].stack_file)
            weakref.finalize(self, self._frozen.close)
        self._sessions.add(session_watch)
        self._rearm()

    def leave(self, session_watch: SessionWatch, reason: str) -> None:
        """Follow it no more. Ranks that still wait for it can read in the store why it was closed."""
        if session_watch not in self._sessions:
            return
        self._sessions.discard(session_watch)
        words = reason or "closed its engine"
        labels = [part.label for part in session_watch.parts]
        self._left.update(dict.fromkeys(labels, words))
        if not self._state.stop.is_set() and self._may_call():
            with contextlib.suppress(StoreLost):
                for label in labels:
                    key = f"left/{label}/{self._rank}"
                    self._call(functools.partial(_set, key, words), timeout_s=2.0)
        _clean_up(session_watch.peers, self._rank, self._here)

    def release(self) -> None:
        """Close the watchdog, unless it follows a session or is held for the process group."""
        if not self._sessions and self not in _HELD:
            self.close()

    def check(self, _missing: Sequence[int] = ()) -> None:
        """Raise the fatal diagnosis, if there is one.

        Raises:
            DistributedError: what :func:`error_of` makes of the diagnosis.
        """
        diagnosis = self._state.diagnosis
        if diagnosis is not None:
            self._linger()
            raise error_of(diagnosis)

    def position(self, words: bool) -> Position:
        """How many calls of each sequence this rank has made.

        ``words``: with its last calls, and what its program is blocked in.
        """
        reached, last, wait = {}, {}, None
        for part in self._followed():
            if part.label == TORCH:
                continue
            reached[part.label] = part.reached()
            if not words:
                continue
            if not part.label.endswith(MEETINGS):
                flight = part.flight()
                calls = [call_text(record) for record in (flight.records if flight else ())[-1:]]
                last[part.label] = calls[0] if calls else part.label
            blocked = part.wait()
            if blocked is not None and not blocked.behind:
                wait = blocked.label, blocked.seq, blocked.what, blocked.source
        reached[TORCH] = calls_of_torch()
        own = call_of_torch(self._main) if words else None
        return Position(self._rank, reached, last, own[1] if own is not None else "", wait)

    def why_gone(self, label: str, rank: int) -> str:
        """Why ``rank`` will make no further call of ``label``, or "". Raises as :meth:`check`."""
        self.check()
        peer, state, reason = self._read_card(rank)
        fate, detail = peer.fate(self._here) if peer is not None else ("", "")
        if fate == "gone" or state == "left":
            return detail if fate == "gone" else reason
        return self._look(f"left/{label}/{rank}") or ""

    def explain(self, calls: TrackedCalls, peers: Sequence[int]) -> Exception | None:
        """The diagnosis of a broken connection to one of ``peers`` (global ranks); None: not known."""
        if len(peers) == 1:
            calls.suspects.update(peers)
        return self._ask(calls)

    def settle(self, calls: TrackedCalls) -> Exception | None:
        """The diagnosis of histories that differ, as an exchange of hashes found; None: not known."""
        return self._ask(calls)

    def close(self, reason: str | None = None) -> None:
        """End the threads and remove this rank's files.

        ``reason``: why this process ends ("" without an exception); None: the process goes on.
        """
        state = self._state
        if state.stop.is_set():
            return
        state.stop.set()
        state.kick.set()
        atexit.unregister(self._farewell)
        _HELD.discard(self)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        if self._may_call():
            with contextlib.suppress(StoreLost):
                self._post_card("idle" if reason is None else "left", reason or "ended its program")
        self._channel.close()
        if self._frozen is not None:
            self._frozen.close()
        self._presence.close()
        for session_watch in list(self._sessions):
            _clean_up(session_watch.peers, self._rank, self._here)
        _clean_up(self._peers, self._rank, self._here)

    def _ask(self, calls: TrackedCalls) -> Exception | None:
        state = self._state
        calls.doubt = True
        state.kick.set()
        if self._thread.is_alive() and state.ready.wait(_EXPLAIN_S) and state.diagnosis is not None:
            self._linger()
            return error_of(state.diagnosis)
        return None

    def _linger(self) -> None:
        """Wait up to 1.5 s until the others have read the diagnosis: this process may serve the store."""
        self._state.delivered.set()
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(StoreLost):
            while time.monotonic() < until:
                here = sum(
                    r not in self._idle and not peer.has_left(self._here)
                    for r, peer in list(self._peers.items())
                )
                if self._call(lambda s: s.add("read", 0)) >= here:
                    return
                time.sleep(_POLL_S)

    # -- the thread --------------------------------------------------------------------------------

    def tick_s(self) -> float:
        """Seconds until the next look."""
        sessions = list(self._sessions)
        idle = not sessions and self._set_ups_wait() is None
        own = min([self._trust.tick_s, *(session.trust.tick_s for session in sessions)])
        return min(own, _IDLE_TICK_S) if idle else own

    def _set_ups_wait(self) -> object:
        return self._always[0].wait()

    def tick(self) -> None:
        """One look: at the clocks, at questions in the store, and at what is to be done."""
        now_s = time.monotonic()
        if self._over():
            self.close()
            return
        if self._state.diagnosis is not None:
            self._enforce(now_s)
            return
        due: TrackedCalls | None = None
        for calls in self._followed():
            calls.note()
            wait = calls.wait()
            if wait is None:
                calls.report_due_s = 0.0
            if calls.clock.observe(now_s, wait) or calls.doubt:
                due = calls if due is None or calls.doubt else due
        alone = False
        try:
            for followed in list(self._sessions):
                followed.errand()
            asked = self._call(lambda s: s.add("asked", 0), timeout_s=5 * self._trust.tick_s)
            if asked > self._answered:
                self._answer(asked)
            elif due is not None:
                alone = not self._inquire(asked + 1, due)
        except StoreLost:
            alone = due is not None
        if alone and due is not None and self._state.diagnosis is None:
            self._judge_alone(due)

    def _followed(self) -> list[TrackedCalls]:
        parts = [part for session in list(self._sessions) for part in session.parts]
        return [*parts, *self._always]

    def _call(self, operation: Callable[[Store], Any], timeout_s: float = 5.0) -> Any:
        """Use the store, unless its server is known to have gone: torch would log many lines then.

        Raises:
            StoreLost: the store did not answer within ``timeout_s``, or its server has gone.
        """
        self._rearm()
        if not self._may_call():
            raise StoreLost("the process that served the store has left")
        return self._channel.call(operation, timeout_s)

    def _may_call(self) -> bool:
        server = self._peers.get(self._store_rank) if self._store_rank is not None else None
        gone = server is not None and server.fate(self._here)[0] == "gone"
        return not gone and not self._hung_up()

    def _rearm(self) -> None:
        """Put off the dump of this process's stacks, since its interpreter runs."""
        if self._frozen is not None and not self._state.stop.is_set():
            self._frozen.arm(10 * self._trust.tick_s)

    def _post_card(self, state: str, reason: str = "") -> None:
        card = {"state": state, "reason": reason, "process": asdict(self._here)}
        text = json.dumps({**card, "box": self._peers[self._rank].recording})
        self._call(lambda s: s.set(f"card/{self._rank}", text), timeout_s=2.0)

    def _read_card(self, rank: int) -> tuple[Peer | None, str, str]:
        """Another rank's process, its state (``on``, ``idle`` or ``left``) and why; None: no card yet."""
        text = self._look(f"card/{rank}")
        if text is None:
            return None, "", ""
        card = json.loads(text)
        peer = Peer(rank, Process(**card["process"]), card["box"])
        # A process whose files cannot be seen is in another container: treat it as on another host.
        if card["state"] == "on" and not Path(peer.recording).exists():
            card = json.loads(self._look(f"card/{rank}") or text)
            peer = (
                peer if card["state"] != "on" or peer.fate(self._here)[0] == "gone" else peer.far()
            )
        self._peers[rank] = peer
        (self._idle.add if card["state"] == "idle" else self._idle.discard)(rank)
        return peer, card["state"], card["reason"]

    def _answer(self, asked: int) -> None:
        """Post what this rank does, then wait for the diagnosis of the rank that asked."""
        label = self._look(f"label/{asked}") or ""
        calls = next((t for t in self._followed() if t.label == label), None)
        text = json.dumps(self._own_answer(label, calls))
        self._call(lambda s: s.set(f"answer/{asked}/{self._rank}", text))
        self._answered = asked
        self._elected_at_s = None
        until = time.monotonic() + 7 * self._trust.tick_s
        while time.monotonic() < until and not self._state.stop.is_set():
            found = self._call(lambda s: read_verdict(s, asked, self._since))
            if found is not None:
                diagnosis, reported = found
                if reported and calls is not None:
                    calls.report_due_s = calls.next_report_s()
                if diagnosis.fatal:
                    self._adopt(diagnosis)
                elif calls is not None:
                    calls.doubt = False
                return
            time.sleep(_POLL_S)

    def _inquire(self, number: int, calls: TrackedCalls) -> bool:
        """Ask all ranks, judge and publish, if this rank is elected for question ``number``.

        False: another rank was elected and has not acted for five ticks.
        """
        if self._call(lambda s: s.add(f"elect/{number}", 1)) != 1:
            now_s = time.monotonic()
            self._elected_at_s = self._elected_at_s or now_s
            return now_s - self._elected_at_s < 5 * self._trust.tick_s
        self._elected_at_s = None
        self._answered = number
        self._call(lambda s: s.set(f"label/{number}", calls.label))
        self._call(lambda s: s.add("asked", 1))
        diagnosis, statuses = self._judged(calls, self._collect(number, calls))
        reported = self._publish_locally(calls, diagnosis, statuses)
        text = json.dumps({"number": number, "verdict": asdict(diagnosis), "reported": reported})
        self._call(lambda s: write_verdict(s, number, text, diagnosis.fatal))
        if diagnosis.fatal:
            self._adopt(diagnosis)
        return True

    def _collect(self, number: int, calls: TrackedCalls) -> list[RankStatus]:
        """The answers to question ``number``; for ranks that cannot answer, what this host knows."""
        own = self._own_answer(calls.label, calls)
        found = {self._rank: status_from_answer(self._peers[self._rank], own)}
        until = time.monotonic() + 5 * self._trust.tick_s
        while True:
            over = time.monotonic() > until or self._state.stop.is_set()
            for rank in self._ranks:
                if rank in found:
                    continue
                text = self._look(f"answer/{number}/{rank}")
                if text is not None:
                    answer = json.loads(text)
                    calls.suspects.update(answer["suspects"])
                    found[rank] = status_from_answer(self._known(rank, calls), answer)
                    continue
                status = self._unanswered(rank, calls)
                if over or status.fate not in ("runs", "silent"):
                    found[rank] = status
            if len(found) == len(self._ranks) or over:
                return [found[rank] for rank in sorted(found)]
            time.sleep(_POLL_S)

    def _unanswered(self, rank: int, calls: TrackedCalls) -> RankStatus:
        """What is known of a rank that has not answered."""
        base, state, reason = self._read_card(rank)
        if base is None:
            return RankStatus(rank, None, fate="absent", detail=_NOT_HERE, answered=False)
        if state == "idle" and rank not in calls.peers and base.fate(self._here)[0] != "gone":
            return RankStatus(rank, None, fate="absent", detail=_IDLE, answered=False)
        status = status_from_host(self._known(rank, calls), self._here)
        why = self._look(f"left/{calls.label}/{rank}") or (reason if state == "left" else None)
        if why is not None and status.fate != "stopped":
            gone = status.fate == "gone" and state != "left"
            status = replace(status, fate="gone" if gone else "left", detail=f"left: {why}")
        return status

    def _known(self, rank: int, calls: TrackedCalls) -> Peer:
        """The rank's process, and the path of its recording of ``calls``."""
        peer = calls.peers.get(rank) or self._peers.get(rank)
        return peer or Peer(rank, Process("", "", 0, ""), "")

    def _look(self, key: str) -> str | None:
        return cast("str | None", self._call(lambda s: look(s, key)))

    def _judge_alone(self, calls: TrackedCalls) -> None:
        """Judge by what this host shows, without the store."""
        seen = [status_from_answer(self._peers[self._rank], self._own_answer(calls.label, calls))]
        for rank in self._ranks:
            if rank != self._rank and (rank in calls.peers or rank in self._peers):
                peer = self._known(rank, calls)
                seen.append(status_from_host(peer, self._here, asked=False))
        diagnosis, statuses = self._judged(calls, sorted(seen, key=lambda w: w.rank))
        self._publish_locally(calls, diagnosis, statuses)
        if diagnosis.fatal:
            self._adopt(diagnosis)

    def _judged(
        self, calls: TrackedCalls, statuses: list[RankStatus]
    ) -> tuple[Diagnosis, list[RankStatus]]:
        suspects = calls.suspects
        statuses = [without_connection(w) if w.rank in suspects else w for w in statuses]
        limits = calls.trust.limits(calls.step_s())
        same = [w.blocked_s for w in statuses if w.wait and w.wait.label == calls.label]
        blocked_s = max([calls.clock.blocked_s, *same])
        diagnosis = diagnose(
            statuses,
            limits,
            blocked_s=blocked_s,
            details=str(self._dump_path(statuses)),
            label=calls.label,
        )
        calls.doubt = False
        # A broken connection does not heal.
        return replace(diagnosis, fatal=diagnosis.fatal or bool(suspects)), statuses

    def _publish_locally(
        self, calls: TrackedCalls, diagnosis: Diagnosis, statuses: list[RankStatus]
    ) -> bool:
        """Print a diagnosis that is not fatal when a report is due; write the full evidence to a file.

        False: it was too early for a report.
        """
        due = max(calls.report_due_s, calls.first_report_s())
        if not diagnosis.fatal and calls.clock.blocked_s < due:
            return False
        self._dump(diagnosis, statuses)
        if not diagnosis.fatal:
            calls.report_due_s = calls.next_report_s()
            print(diagnosis.text, file=sys.stderr, flush=True)
        return True

    def _dump_path(self, statuses: Sequence[RankStatus]) -> Path:
        root = self._trust.dump_dir or str(Path(tempfile.gettempdir()) / "zeroshard")
        step = max((w.flight.step for w in statuses if w.flight), default=0)
        return Path(root) / f"hang-{step}-{self._here.pid}.json"

    def _dump(self, diagnosis: Diagnosis, statuses: list[RankStatus]) -> None:
        """Write the diagnosis and the status of every rank, with records and stacks, to a file."""
        path = self._dump_path(statuses)
        evidence = {"verdict": asdict(diagnosis), "witnesses": [asdict(w) for w in statuses]}
        with contextlib.suppress(OSError):  # a full disk must not hide the diagnosis
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(evidence, indent=1))

    def _own_answer(self, label: str, calls: TrackedCalls | None) -> dict[str, Any]:
        followed = self._followed()
        waits = [wait for part in followed if (wait := part.wait()) is not None]
        keep = max(32, 4096 // len(self._ranks))
        flight = calls.flight() if calls is not None else None
        return {
            "flight": flight and flight._replace(records=flight.records[-keep:]),
            "left": self._left.get(label),
            "blocked_s": max(part.clock.blocked_s for part in followed),
            "suspects": sorted(calls.suspects) if calls is not None else [],
            "stack": stack_line(self._main) if self._trust.stacks else "",
            "stacks": stacks() if self._trust.stacks else "",
            "phase": phase(self._main),
            "wait": next((w for w in waits if not w.behind), None),
            "reached": {part.label: part.reached() for part in followed if part.label != TORCH},
        }

    def _adopt(self, diagnosis: Diagnosis) -> None:
        """Take over a fatal diagnosis: hand it to the main thread, and wake that from its wait."""
        state = self._state
        if state.diagnosis is not None:
            return
        state.diagnosis = diagnosis
        self._deadline_s = time.monotonic() + self._trust.grace_s
        with contextlib.suppress(StoreLost):
            self._call(lambda s: s.add("read", 1), timeout_s=1.0)
        state.ready.set()
        self._told = call_of_torch(self._main) is not None  # nothing can wake it in there
        if self._told:
            print(diagnosis.text, file=sys.stderr, flush=True)
        for part in self._followed():
            for wake in part.wakers:
                with contextlib.suppress(Exception):
                    wake()

    def _enforce(self, now_s: float) -> None:
        """End the process if the main thread has not raised the fatal diagnosis within ``grace_s``."""
        diagnosis, deadline_s = self._state.diagnosis, self._deadline_s
        if diagnosis is None or deadline_s is None or self._state.delivered.is_set():
            return
        if now_s > deadline_s:
            if not self._told:
                print(diagnosis.text, file=sys.stderr, flush=True)
            sys.stdout.flush()
            for session_watch in list(self._sessions):
                _clean_up(session_watch.peers, self._rank, self._here)
            _clean_up(self._peers, self._rank, self._here)
            os._exit(EXIT_VERDICT)


class SessionWatch:
    """The sequences of one :class:`~.session.CommSession`, and the error explainer of its transports.

    ``peers``: every rank's process and the path of its recording, by global rank. ``parts``: the
    sequences, first the collectives.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        label: str,
        trust: WatchdogSettings,
        peers: Mapping[int, Peer],
        parts: Sequence[TrackedCalls],
    ) -> None:
        self.label = label
        self.trust = trust
        self.peers = dict(peers)
        self.parts = list(parts)
        self.errand: Callable[[], None] = lambda: None  # run at each look, in the watchdog's thread
        self._watchdog = watchdog
        watchdog.follow(self)

    def start(self, *wakers: Callable[[], object]) -> None:
        """Note ``wakers``, which wake the main thread after a fatal diagnosis.

        Called when the recordings of all ranks exist.
        """
        # A process whose files cannot be seen is in another container: treat it as on another host.
        self.peers.update(
            {r: p.far() for r, p in self.peers.items() if not Path(p.recording).exists()}
        )
        for part in self.parts:
            part.peers = self.peers
        self.parts[0].wakers = wakers

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """The exception for a connection to one of ``peers`` (global ranks) that broke in ``item``."""
        error = self._watchdog.explain(self.parts[0], peers)
        return error or errors.RankLost(lost_text(item, peers, detail))

    def settle(self, odd: Sequence[int]) -> Exception:
        """The exception for histories of the ranks ``odd`` that differ from those of the others."""
        return self._watchdog.settle(self.parts[0]) or errors.RankDivergence(divergence_text(odd))

    def readers(self, recorder: Recorder) -> LoneReadCheck:
        """A check whether all ranks read sharded values together. Every rank has to use it.

        ``recorder`` has the collectives of the session.
        """
        weak, label, ranks = weakref.ref(self._watchdog), self.label, tuple(self.peers)

        def watchdog() -> Watchdog:
            if (strong := weak()) is None:
                raise StoreLost("nobody watches any more")
            return strong

        readers = LoneReadCheck(
            lambda operation: watchdog()._call(operation),
            label=label,
            rank=ranks.index(recorder.rank),
            world_size=len(ranks),
            position=lambda words: watchdog().position(words),
            history=lambda: f"{recorder.seq}-{recorder.hash64:x}",
            gone=lambda at: watchdog().why_gone(label, ranks[at]),
            report_s=self.trust.limits().first_report_s,
            limit_s=self.trust.collective_timeout_s,
        )
        self.errand = readers.answer
        return readers

    def close(self, reason: str = "") -> None:
        """End the watch over this session. ``reason``: the exception that ended this rank's part."""
        self._watchdog.leave(self, reason)
        self._watchdog.release()


#: Watchdogs that stay although they follow no session: the process group was opened by ZeroShard.
_HELD: set[Watchdog] = set()


def hold(watchdog: Watchdog) -> None:
    """Keep ``watchdog`` until the process group ends."""
    _HELD.add(watchdog)


def error_of(diagnosis: Diagnosis) -> Exception:
    """The exception of a diagnosis."""
    kind: type[Exception] = getattr(errors, diagnosis.kind, errors.DistributedError)
    return kind(diagnosis.text)


def divergence_text(odd: Sequence[int]) -> str:
    """The message when hashes differ and no rank can be asked."""
    return (
        f"RankDivergence: {rank_ranges(odd)} called other collectives than the other ranks since "
        "the last check.\n  Run the same modules in the same order on every rank."
    )


def _clean_up(peers: Mapping[int, Peer], rank: int, here: Process) -> None:
    """Remove this rank's files. The last rank that leaves this host removes those of its dead ranks too.

    Until then a rank that judges alone can read what the dead ranks did last. Each rank removes its own
    files first and then looks at those of the others. So if two leave at the same time, at least one of
    them sees that it is the last.
    """
    peers[rank].remove_files()
    others = [p for r, p in peers.items() if r != rank and p.is_on(here)]
    if all(peer.has_left(here) for peer in others):
        for peer in others:
            peer.remove_files()


def _set(key: str, value: str, store: Store) -> None:
    store.set(key, value)


def _close_at_exit(watchdog: Watchdog) -> Callable[[], None]:
    """Close the watchdog at exit, with the reason, if the program ends without closing its engine."""
    weak, owner = weakref.ref(watchdog), os.getpid()

    def farewell() -> None:
        strong = weak()
        if strong is not None and os.getpid() == owner:
            error = getattr(sys, "last_value", None)
            strong.close("" if error is None else f"{type(error).__name__}: {error}"[:120])

    atexit.register(farewell)
    return farewell


def _watch(watchdog: weakref.ref[Watchdog], state: _State) -> None:
    """The loop of the thread. It holds the watchdog only during a look, so that it can be collected."""
    complained = False
    strong = watchdog()
    while strong is not None and not state.stop.is_set():
        pause_s = strong.tick_s()
        del strong
        state.kick.wait(pause_s)
        state.kick.clear()
        strong = watchdog()
        if strong is None or state.stop.is_set():
            return
        try:
            strong.tick()
        except Exception as error:  # the watch must not end because one look failed
            if not complained and not state.stop.is_set():
                complained = True
                print(f"zeroshard: the sentinel failed once: {error!r}", file=sys.stderr)
