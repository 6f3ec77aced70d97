"""The watchdog thread: notices that ranks no longer work together and reports the cause on every rank.

[Note: watchdog] The decision: docs/decisions/0003-tagged-transport.md.

Vocabulary. A process has one watchdog for each set of ranks that it joined (:mod:`~.join`), from the
first contact with ZeroShard on. The watchdog *follows* sequences of calls that all ranks take part in
(:mod:`~.tracked_calls`): the collectives of each engine, its control group, set-ups, and what the program
itself calls of ``torch.distributed``. When the host has been inside one call for too long, or a
connection broke, one elected rank asks all others through the store (:mod:`~.messages`), makes a
*diagnosis* of their answers (:mod:`~.inquiry`) and publishes it. A *fatal* diagnosis ends the run.

Watchdogs need no agreement with each other: each posts a *card* in the store that says which process it
watches and in which state (``on``, ``idle`` or ``left``). One may begin or end at any time.

Which thread may do what:

* The main thread runs the program. It is the only one that calls collectives and waits for them. It calls
  :meth:`Watchdog.set_up`, :meth:`~Watchdog.follow` and :meth:`~Watchdog.leave`, and it raises: ``check``
  and ``explain`` raise or return the diagnosis. A thread that saves in the background may call
  ``check`` too.
* The watchdog's thread runs :meth:`Watchdog.tick`, and only that. It reads recorders and Python frames,
  asks, answers and judges. It never waits for a collective and never raises into the program. For a fatal
  diagnosis it sets ``_State.diagnosis``, then the event ``ready``, then calls the ``wakers``, which shut
  down the sockets or waits that the main thread is blocked in. The transport error that this causes is
  replaced by the diagnosis.
* The store client's thread (:mod:`~.messages`) is the only one that touches the watchdog's store client.
  Both other threads use it through :class:`~.messages.Messages`, with a deadline.
* No thread writes the stack of an interpreter that stands still: a signal does ([Note: silent stacks]).

Invariants, and what breaks without them:

* A process has at most one watchdog over the same ranks (``watchdog_of`` in :mod:`~.join`). Answers in
  the store have a key per rank, so two watchdogs of one process would overwrite each other's answers.
* ``diagnosis`` is set once and never changed. So all threads of a rank report the same one.
* A fatal diagnosis is raised, or else the process ends with exit code 75 after ``grace_s`` seconds
  (:meth:`Watchdog._enforce`). Otherwise a main thread that nothing can wake would hang.
* A rank that raises stays for up to 1.5 s until the others have read the diagnosis, because its process
  may serve the store. Otherwise the others would only see that the store is gone.
* While nothing is wrong, a watchdog makes one request to the store in
  :func:`~.settings.store_tick_s`. It looks further when the bell in the store has rung
  (:meth:`~.messages.Messages.listen`), or when its own rank is stuck. Otherwise thousands of ranks would
  keep the host that serves the store busy.
* No call to the store lacks a deadline, since a store whose server is frozen never answers. If the store
  is lost, the watchdog judges by what its own host shows (:meth:`~.inquiry.Inquiry.judge_alone`).
* The thread holds the watchdog by a weak reference between two looks. Otherwise the watchdog of an
  engine that the program dropped without closing it would never end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from zeroshard.comm.host import this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.store_keys import Store
from zeroshard.errors import CLOSED, ENDED, EXIT_DIAGNOSIS
from zeroshard.run.exit_report import tell_launcher
from zeroshard.watchdog.diagnosis import Diagnosis
from zeroshard.watchdog.inquiry import POLL_S, Inquiry, own_answer
from zeroshard.watchdog.lone_reads import Position, position_of
from zeroshard.watchdog.messages import Messages, StoreLost
from zeroshard.watchdog.run_record import Peer, Peers, keep_recordings, remove_files
from zeroshard.watchdog.settings import WatchdogSettings, store_tick_s
from zeroshard.watchdog.stacks import StackFile, call_of_torch, stack_of, stacks
from zeroshard.watchdog.tracked_calls import CallsOfTorch, SetUps, TrackedCalls, newest_of

#: How long the store may take to answer a rank that starts. All ranks start at once.
_START_S = 60.0
#: How long a main thread with a broken connection waits for the diagnosis.
_EXPLAIN_S = 8.0
#: How long it then stays so that the others can read the diagnosis: this process may serve the store.
_LINGER_S = 1.5
#: How long a main thread in a call of torch has until the process ends. Only the end of another rank may
#: wake it earlier.
_TOLD_S = 4.0
#: Views that a rank may answer late, and looks for the words of one.
_OPEN_VIEWS = 4
#: Longest pause between looks while nothing is followed: the process group may end.
_IDLE_TICK_S = 0.25


@dataclass
class _State:
    """What the watchdog's thread and the main thread share.

    ``diagnosis`` is set once, before ``ready``. ``delivered``: the main thread raises the diagnosis.
    ``kick`` asks the watchdog's thread to look at once. ``stop`` ends that thread.
    """

    diagnosis: Diagnosis | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    delivered: threading.Event = field(default_factory=threading.Event)
    kick: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class WatchedSession(Protocol):
    """What a watchdog follows: see :class:`~.session.SessionWatch`."""

    settings: WatchdogSettings
    peers: Peers
    parts: list[TrackedCalls]
    errands: list[Callable[[], None]]

    def failure(self) -> str:
        """The error that a call of the current step ended with."""


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
        settings: WatchdogSettings,
        store_rank: int | None = None,
        over: Callable[[], bool] = lambda: False,
        hung_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank = rank
        self._ranks = tuple(ranks)
        self._here = this_process()
        self._settings = settings
        self._over = over
        self._main = threading.get_ident()
        self._state = _State()
        self._set_ups = SetUps()
        self._sessions: weakref.WeakSet[WatchedSession] = weakref.WeakSet()
        self._always = self._always_followed()
        self._set_ups_of: dict[tuple[int, ...], SetUps] = {}
        self._running: list[TrackedCalls] = []  # set-ups of some ranks
        self._left: dict[str, str] = {}
        self._stack: StackFile | None = None
        self._elected_at_s: float | None = None
        self._listen_due_s = 0.0
        self._has_rung = False  # and the number of the newest question has not been read since
        self._deadline_s: float | None = None
        self._told = False
        self._presence = Recorder(
            "process", ring=2, recording=recording, rank=rank, group_size=len(ranks)
        )
        self._own = Peer(rank, self._here, str(recording))
        self.messages = Messages(store, self._own, store_rank=store_rank, hung_up=hung_up)
        self._inquiry = Inquiry(rank, self._ranks, self._here, self.messages, self._state.stop)
        times = self.messages.add(f"times/{rank}", 1, timeout_s=_START_S)
        # A rank that starts its first watchdog still reads the diagnosis that ended the run. A rank that
        # starts another one reads only newer ones.
        self._since = self._answered = self._viewed = 0
        self._views_due: dict[int, int] = {}  # number -> looks until it is given up
        if times > 1:
            self._since = self._answered = self.messages.asked(timeout_s=_START_S)
        self.messages.post_card("on", timeout_s=_START_S)
        self._farewell = _close_at_exit(self)
        weakref.finalize(self, atexit.unregister, self._farewell)
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._state),
            name=f"zeroshard-watchdog-{rank}",
            daemon=True,
        )
        self._thread.start()

    @property
    def folder(self) -> Path:
        """The directory of this process's recordings."""
        return Path(self._own.recording).parent

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
    def set_up(self, number: int, what: str, settings: WatchdogSettings) -> Iterator[None]:
        """A context for the ``number``-th set-up of these ranks, from 1. ``what``: the program's call."""
        self._main = threading.get_ident()
        self._settings = settings
        self._always = self._always_followed()
        with self._set_ups.begin(number, what):
            yield

    @contextlib.contextmanager
    def set_up_with(
        self, members: tuple[int, ...], what: str, settings: WatchdogSettings
    ) -> Iterator[None]:
        """A context for the next set-up of some global ranks. ``what``: the program's call."""
        self._main = threading.get_ident()
        set_ups = self._set_ups_of.setdefault(members, SetUps(members))
        followed = set_ups.followed(settings)
        self._running.append(followed)
        try:
            with set_ups.begin(set_ups.reached + 1, what):
                yield
        finally:
            self._running.remove(followed)

    def follow(self, session_watch: WatchedSession) -> None:
        """Follow the sequences of ``session_watch`` too, from now on."""
        if self._stack is None and session_watch.settings.stacks:
            self._stack = StackFile(self.folder)
            weakref.finalize(self, self._stack.close)
        self._sessions.add(session_watch)

    def tell_left(self, session_watch: WatchedSession, reason: str) -> None:
        """Tell the other ranks why this rank makes no further call of the session."""
        labels = [part.label for part in session_watch.parts]
        self._left.update(dict.fromkeys(labels, reason))
        if not self._state.stop.is_set():
            with contextlib.suppress(StoreLost):
                for label in labels:
                    self.messages.post_left(label, reason)

    def leave(self, session_watch: WatchedSession, reason: str) -> None:
        """Stop following the session. Ranks that wait for it can read in the store why it was closed."""
        if session_watch not in self._sessions:
            return
        self.tell_left(session_watch, reason or CLOSED)
        self._sessions.discard(session_watch)
        self._keep(self._own, reason)
        for peers in _recordings(session_watch):
            self._remove_files(peers)

    def release(self) -> None:
        """Close the watchdog, unless it follows a session or is held for the process group."""
        if not self._sessions and self not in _HELD:
            self.close()

    def check(self, _missing: Sequence[int] = ()) -> None:
        """Raise the fatal diagnosis, if there is one.

        Raises:
            DistributedError: see :meth:`~.diagnosis.Diagnosis.error`.
        """
        diagnosis = self._state.diagnosis
        if diagnosis is not None:
            self._linger()
            raise diagnosis.error()

    def check_wait(self) -> None:
        """The same after a wait for a device, on any thread. It costs one look if nothing is wrong.

        A thread beside the main thread does not deliver the diagnosis to the program.
        """
        diagnosis = self._state.diagnosis
        if diagnosis is not None:
            if threading.get_ident() == self._main:
                self._linger()
            raise diagnosis.error()

    def position(self, words: bool) -> Position:
        """See :func:`~.lone_reads.position_of`."""
        return position_of(self._rank, self._followed(), self._main, words=words)

    def why_gone(self, label: str, rank: int) -> str:
        """Why ``rank`` will make no further call of ``label``, or "". Raises as :meth:`check`."""
        self.check()
        peer, state, reason = self.messages.read_card(rank)
        fate, detail = peer.fate(self._here) if peer is not None else ("", "")
        if fate == "gone" or state == "left":
            return detail if fate == "gone" else reason
        return self.messages.why_left(label, rank) or ""

    def explain(self, calls: TrackedCalls, peers: Sequence[int] = ()) -> Exception | None:
        """The diagnosis of a broken connection to one of ``peers`` (global ranks); None: not known.

        Without ``peers``: after an exchange of hashes has shown that histories differ.
        """
        if len(peers) == 1:
            calls.suspects.update(peers)
        state = self._state
        calls.doubt = True
        state.kick.set()
        if self._thread.is_alive() and state.ready.wait(_EXPLAIN_S) and state.diagnosis is not None:
            self._linger()
            return state.diagnosis.error()
        return None

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
        with contextlib.suppress(StoreLost):
            state_word = "idle" if reason is None else "left"
            self.messages.post_card(state_word, reason or ENDED)
        self.messages.close()
        if self._stack is not None:
            self._stack.close()
        self._presence.close()
        self._clean_up_all(reason or "")

    def _clean_up_all(self, reason: str = "") -> None:
        self._keep(self._own, reason)
        for session_watch in list(self._sessions):
            for peers in _recordings(session_watch):
                self._remove_files(peers)
        self._remove_files(self.messages.peers)

    def _remove_files(self, peers: Mapping[int, Peer]) -> None:
        remove_files(peers, self._rank, self._here, lambda peer: self._keep(peer, "", dead=True))

    def _keep(self, peer: Peer, reason: str, *, dead: bool = False) -> None:
        """Keep the recordings of a rank in the run's folder, unless it ends cleanly."""
        diagnosis = self._state.diagnosis
        why = reason or (diagnosis.text.partition("\n")[0] if diagnosis and not dead else "")
        if why or dead:
            keep_recordings(self._settings.dump_dir, peer, why, by=self._rank)

    def _linger(self) -> None:
        """Wait until the others have read the diagnosis: this process may serve the store.

        Up to 1.5 s, or as long as very many ranks need to look into the store.
        """
        self._state.delivered.set()
        store_tick_s = self._store_tick_s()
        until = time.monotonic() + max(_LINGER_S, 1.5 * store_tick_s)
        with contextlib.suppress(StoreLost):
            while time.monotonic() < until:
                here = sum(
                    r not in self.messages.idle and not peer.has_left(self._here)
                    for r, peer in list(self.messages.peers.items())
                )
                if self.messages.count_read() >= here:
                    return
                time.sleep(max(POLL_S, len(self._ranks) / 4096))

    # -- the thread --------------------------------------------------------------------------------

    def tick_s(self) -> float:
        """Seconds until the next look."""
        sessions = list(self._sessions)
        idle = not sessions and not self._running and self._always[0].wait() is None  # set-ups
        own = min([self._settings.tick_s, *(session.settings.tick_s for session in sessions)])
        return min(own, _IDLE_TICK_S) if idle else own

    def tick(self) -> None:
        """Look once at the followed calls and at the questions in the store. Ask or answer if needed."""
        now_s = time.monotonic()
        if self._over():
            self.close()
            return
        if self._state.diagnosis is not None:
            self._enforce(now_s)
            return
        due = self._due(now_s)
        try:
            self._listen(now_s)
            for followed in list(self._sessions):
                for errand in followed.errands:
                    errand()
            alone = not self._look(due)
        except StoreLost:
            alone = True
        if alone and due is not None and self._state.diagnosis is None:
            own = self._own_answer(due.label, due)
            self._adopt(self._inquiry.judge_alone(due, self._settings, own))

    def _due(self, now_s: float) -> TrackedCalls | None:
        """The calls to ask about: those in doubt, or else the first that have waited for too long."""
        due: TrackedCalls | None = None
        for calls in self._followed():
            calls.note()
            wait = calls.wait()
            if wait is None:
                calls.report_due_s = 0.0
            if calls.clock.observe(now_s, wait) or calls.doubt:
                due = calls if due is None or calls.doubt else due
        return due

    def _look(self, due: TrackedCalls | None) -> bool:
        """Read the store if there may be news. Answer, or ask about ``due``; False: that failed."""
        if not (self._has_rung or due is not None or self._views_due):
            return True
        asked, views = self.messages.news(timeout_s=5 * self._settings.tick_s)
        self._has_rung = False
        self._show(views)
        if asked > self._answered:
            self._answer(asked)
            return True
        return due is None or self._inquire(asked + 1, due)

    def _listen(self, now_s: float) -> None:
        """Note whether another rank wants this one to look into the store, if it is time to ask."""
        if now_s < self._listen_due_s:
            return
        heard = self.messages.listen(timeout_s=5 * self._settings.tick_s)
        self._has_rung = heard or self._has_rung
        # Half a tick early: a look that comes a little too early must not wait for the next one.
        self._listen_due_s = now_s + self._store_tick_s() - self.tick_s() / 2

    def _store_tick_s(self) -> float:
        return store_tick_s(self.tick_s(), len(self._ranks))

    def _always_followed(self) -> list[TrackedCalls]:
        settings = self._settings
        return [self._set_ups.followed(settings), CallsOfTorch(self._main).followed(settings)]

    def _followed(self) -> list[TrackedCalls]:
        parts = [part for session in list(self._sessions) for part in session.parts]
        return [*parts, *self._always, *self._running]

    def _show(self, views: int) -> None:
        """Answer ``zeroshard stacks``. ``views``: the number of its newest question."""
        for number in range(max(self._viewed, views - _OPEN_VIEWS) + 1, views + 1):
            self._views_due[number] = _OPEN_VIEWS
        self._viewed = views
        for number in list(self._views_due):
            asked = self.messages.view(number)  # its words are written after its number
            self._views_due[number] -= 1
            if asked is not None:
                self.messages.show(number, self._view(asked))
            if asked is not None or not self._views_due[number]:
                del self._views_due[number]

    def _view(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        followed = self._followed()
        return {
            **self._own_answer("", newest_of(followed)),
            "process": asdict(self._here),
            "main": stack_of(self._main) if self._settings.stacks else "",
            "stacks": stacks(None) if asked["threads"] and self._settings.stacks else "",
        }

    def _answer(self, asked: int) -> None:
        """Post what this rank does, then wait for the diagnosis of the rank that asked."""
        label = self.messages.label_of(asked)
        calls = next((t for t in self._followed() if t.label == label), None)
        self.messages.answer(asked, self._own_answer(label, calls))
        self._answered = asked
        self._elected_at_s = None
        wait_s = self._settings.answer_s(len(self._ranks)) + 2 * self._store_tick_s()
        until, pause_s = time.monotonic() + wait_s, POLL_S
        while time.monotonic() < until and not self._state.stop.is_set():
            found = self.messages.diagnosis_of(asked, self._since)
            if found is not None:
                diagnosis, reported = found
                self._inquiry.note(diagnosis, calls.clock.blocked_s if calls is not None else 0.0)
                if reported and calls is not None:
                    calls.report_due_s = calls.next_report_s()
                if calls is not None and not diagnosis.fatal:
                    calls.doubt = False
                self._adopt(diagnosis)
                return
            time.sleep(pause_s)
            pause_s = max(POLL_S, min(2 * pause_s, len(self._ranks) / 2048))

    def _inquire(self, number: int, calls: TrackedCalls) -> bool:
        """Ask all ranks, judge and publish, if this rank is elected for question ``number``.

        False: another rank was elected and has not acted for five ticks.
        """
        if not self.messages.is_elected(number):
            now_s = time.monotonic()
            self._elected_at_s = self._elected_at_s or now_s
            return now_s - self._elected_at_s < self._settings.answer_s(len(self._ranks))
        self._elected_at_s = None
        self._answered = number
        own = self._own_answer(calls.label, calls)
        diagnosis = self._inquiry.ask(number, calls, self._settings, own)
        if diagnosis.fatal:  # another rank may have found the cause before, and left because of it
            with contextlib.suppress(StoreLost):
                found = self.messages.diagnosis_of(number, self._since)
                diagnosis = found[0] if found is not None else diagnosis
        self._adopt(diagnosis)
        return True

    def _own_answer(self, label: str, calls: TrackedCalls | None) -> dict[str, Any]:
        return own_answer(
            self._followed(),
            calls,
            left=self._left.get(label),
            failed=next(filter(None, (each.failure() for each in list(self._sessions))), ""),
            main=self._main,
            keep=max(32, 4096 // len(self._ranks)),
            with_stacks=self._settings.stacks,
        )

    def _adopt(self, diagnosis: Diagnosis) -> None:
        """Take over a fatal diagnosis: hand it to the main thread, and wake that from its wait."""
        state = self._state
        if not diagnosis.fatal or state.diagnosis is not None:
            return
        state.diagnosis = diagnosis
        tell_launcher(diagnosis.error(), os.environ)
        self._told = call_of_torch(self._main) is not None  # nothing can wake it in there
        grace_s = self._settings.grace_s
        self._deadline_s = time.monotonic() + (min(grace_s, _TOLD_S) if self._told else grace_s)
        with contextlib.suppress(StoreLost):
            self.messages.count_read(1.0, more=1)
        state.ready.set()
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
            self._clean_up_all()
            os._exit(EXIT_DIAGNOSIS)


#: Watchdogs that stay although they follow no session: the process group was opened by ZeroShard.
_HELD: set[Watchdog] = set()


def _recordings(session: WatchedSession) -> list[Mapping[int, Peer]]:
    """The ranks of a session with the paths of their recordings, and those of this rank's groups.

    Without those of other hosts, whose files are not here.
    """
    return [session.peers.near, *(part.peers for part in session.parts if part.members)]


def hold(watchdog: Watchdog) -> None:
    """Keep ``watchdog`` until the process group ends."""
    _HELD.add(watchdog)


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
                print(f"zeroshard: the watchdog failed once: {error!r}", file=sys.stderr)
