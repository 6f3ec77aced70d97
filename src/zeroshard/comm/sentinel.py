"""Who notices that ranks no longer get on, and how does everybody learn why?

One thread per engine. It watches for how long the host has been inside one collective. When that is
too long, or a connection broke, one rank asks all others through the store what they are doing,
judges the answers (:mod:`zeroshard.core.verdict`) and publishes the verdict. A fatal verdict wakes
the blocked main thread by ending the traffic on the engine's own sockets; the transport error that
this causes is replaced by the verdict.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from zeroshard import errors
from zeroshard.comm.collectives import lost_text
from zeroshard.comm.evidence import (
    FrozenStack,
    Peer,
    stack_line,
    stacks,
    without_connection,
    witness_from_answer,
    witness_from_host,
)
from zeroshard.comm.side import SideChannel, SideChannelLost, look, read_verdict, write_verdict
from zeroshard.core.flight import rank_ranges
from zeroshard.core.verdict import StallClock, Verdict, Witness, judge

if TYPE_CHECKING:
    from zeroshard.comm.agree import Store
    from zeroshard.comm.recorder import Item, Recorder
    from zeroshard.comm.trust import TrustSettings

EXIT_VERDICT = 75
#: How long a main thread with a broken connection waits for the reason.
_EXPLAIN_S = 8.0
#: How long it then stays so that the others can read the verdict: the store may live in here.
_LINGER_S = 1.5
_POLL_S = 0.02


@dataclass
class _State:
    """What the thread and the main thread share."""

    suspects: set[int] = field(default_factory=set)
    doubt: bool = False
    verdict: Verdict | None = None
    ready: threading.Event = field(default_factory=threading.Event)
    delivered: threading.Event = field(default_factory=threading.Event)
    kick: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)


class Sentinel:
    """Watches the ranks of one recorder. ``store`` is a client of its own with a fresh key space.

    ``peers`` has one entry per rank of the group, in group order; ``rank`` is the global rank.
    ``store_rank`` is the rank whose process serves the store; None: none does.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        peers: Sequence[Peer],
        recorder: Recorder,
        trust: TrustSettings,
        store_rank: int | None = None,
    ) -> None:
        self._rank = rank
        self._peers = {peer.rank: peer for peer in peers}
        self._here = self._peers[rank].process
        self._recorder = recorder
        self._trust = trust
        self._main = threading.get_ident()
        self._state = _State()
        self._stall = StallClock(min(5.0, trust.limits().first_report_s / 2))
        self._store_peer = self._peers.get(store_rank) if store_rank not in (None, rank) else None
        self._frozen = FrozenStack(Path(self._peers[rank].box + ".stack")) if trust.stacks else None
        self._wakers: list[Callable[[], object]] = []
        self._answered = 0
        self._report_due_s = 0.0
        self._elected_at_s: float | None = None
        self._deadline_s: float | None = None
        self._channel = SideChannel(store, name=f"zeroshard-side-{rank}")
        # An engine that is forgotten instead of closed must not leave threads or files either.
        weakref.finalize(self, self._channel.end)
        if self._frozen is not None:
            weakref.finalize(self, self._frozen.close)
        self._thread = threading.Thread(
            target=_watch,
            args=(weakref.ref(self), self._state, trust.tick_s),
            name=f"zeroshard-sentinel-{rank}",
            daemon=True,
        )

    def start(self, *wakers: Callable[[], object]) -> None:
        """Begin to watch; ``wakers`` are called after a fatal verdict to wake the main thread."""
        self._wakers = list(wakers)
        # All logs exist by now. What cannot be seen is in another container: as good as far away.
        self._peers.update({r: p.far() for r, p in self._peers.items() if not Path(p.box).exists()})
        self._rearm()
        self._thread.start()

    @property
    def peers(self) -> dict[int, Peer]:
        """All ranks of the group by global rank, this one too."""
        return self._peers

    # -- called by the main thread -----------------------------------------------------------------

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """What broke the connection to one of ``peers`` (global ranks) during ``item``."""
        state = self._state
        if len(peers) == 1:
            state.suspects.update(peers)
        state.doubt = True
        state.kick.set()
        if self._thread.is_alive() and state.ready.wait(_EXPLAIN_S) and state.verdict is not None:
            self._linger()
            return error_of(state.verdict)
        return errors.RankLost(lost_text(item, peers, detail))

    def settle(self, odd: Sequence[int]) -> Exception:
        """Why the histories of ``odd`` ranks differ from the others', as a hash exchange found."""
        state = self._state
        state.doubt = True
        state.kick.set()
        if self._thread.is_alive() and state.ready.wait(_EXPLAIN_S) and state.verdict is not None:
            self._linger()
            return error_of(state.verdict)
        return errors.RankDivergence(divergence_text(odd))

    def close(self, reason: str = "") -> None:
        """Say goodbye, end the threads. ``reason``: the exception that ends this rank, if any."""
        state = self._state
        if state.stop.is_set():
            return
        state.stop.set()
        state.kick.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2.0)
        words = reason or "closed its engine"
        with contextlib.suppress(SideChannelLost):
            self._call(lambda s: s.set(f"left/{self._rank}", words), timeout_s=2.0)
        self._channel.close()
        if self._frozen is not None:
            self._frozen.close()
        self._clean_up()

    def _linger(self) -> None:
        """Let the others read the verdict before this process, and perhaps the store, goes."""
        self._state.delivered.set()
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(SideChannelLost):
            while time.monotonic() < until:
                here = sum(not peer.has_left(self._here) for peer in self._peers.values())
                if self._call(lambda s: s.add("read", 0)) >= here:
                    return
                time.sleep(_POLL_S)

    # -- the thread --------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Before the first look, on the thread."""
        self._recorder.enter_thread()

    def tick(self) -> None:
        """One look: at the clock, at the store, at what must be done."""
        now_s = time.monotonic()
        if self._state.verdict is not None:
            self._enforce(now_s)
            return
        recorder = self._recorder
        recorder.note_wait()
        waiting = recorder.oldest_pending()
        due = self._stall.observe(now_s, waiting[0] if waiting is not None else None)
        if waiting is None:
            self._report_due_s = 0.0
        alone = False
        try:
            asked = self._call(lambda s: s.add("asked", 0), timeout_s=5 * self._trust.tick_s)
            if asked > self._answered:
                self._answer(asked)
            elif due or self._state.doubt:
                alone = not self._inquire(asked + 1)
        except SideChannelLost:
            alone = due or self._state.doubt
        if alone and self._state.verdict is None:
            self._judge_alone()

    def _call(self, operation: Callable[[Store], Any], timeout_s: float = 5.0) -> Any:
        """Use the store, unless its server is known to go: torch would write pages about it."""
        self._rearm()
        server = self._store_peer
        if server is not None and server.has_left(self._here):
            raise SideChannelLost(f"rank {server.rank}, which served the store, has left")
        return self._channel.call(operation, timeout_s)

    def _rearm(self) -> None:
        """This process runs Python: put off the dump of its stacks."""
        if self._frozen is not None:
            self._frozen.arm(10 * self._trust.tick_s)

    def _answer(self, asked: int) -> None:
        """Say what this rank does, then wait for what the asker makes of it."""
        text = json.dumps(self._own_answer())
        self._call(lambda s: s.set(f"answer/{asked}/{self._rank}", text))
        self._answered = asked
        self._elected_at_s = None
        until = time.monotonic() + 7 * self._trust.tick_s
        while time.monotonic() < until and not self._state.stop.is_set():
            found = self._call(lambda s: read_verdict(s, asked))
            if found is not None:
                verdict, reported = found
                if reported:
                    self._report_due_s = self._next_report_s()
                if verdict.fatal:
                    self._adopt(verdict)
                else:
                    self._state.doubt = False
                return
            time.sleep(_POLL_S)

    def _inquire(self, number: int) -> bool:
        """Ask all ranks, judge, publish. False: somebody was elected for it and does not act."""
        if self._call(lambda s: s.add(f"elect/{number}", 1)) != 1:
            now_s = time.monotonic()
            self._elected_at_s = self._elected_at_s or now_s
            return now_s - self._elected_at_s < 5 * self._trust.tick_s
        self._elected_at_s = None
        self._answered = number
        self._call(lambda s: s.add("asked", 1))
        verdict, witnesses = self._judged(self._collect(number))
        reported = self._publish_locally(verdict, witnesses)
        text = json.dumps({"verdict": asdict(verdict), "reported": reported})
        self._call(lambda s: write_verdict(s, number, text, verdict.fatal))
        if verdict.fatal:
            self._adopt(verdict)
        return True

    def _collect(self, number: int) -> list[Witness]:
        """The answers to question ``number``; of ranks that cannot answer, what this host knows."""
        found = {self._rank: witness_from_answer(self._peers[self._rank], self._own_answer())}
        until = time.monotonic() + 5 * self._trust.tick_s
        while True:
            missing = [r for r in self._peers if r not in found]
            for rank in missing:
                text = self._look(f"answer/{number}/{rank}")
                if text is not None:
                    answer = json.loads(text)
                    self._state.suspects.update(answer["suspects"])
                    found[rank] = witness_from_answer(self._peers[rank], answer)
                    continue
                witness = witness_from_host(self._peers[rank], self._here)
                reason = self._look(f"left/{rank}")
                if witness.fate in ("gone", "stopped") or reason is not None:
                    if reason is not None and witness.fate != "stopped":
                        witness = replace(witness, fate="left", detail=f"left: {reason}")
                    found[rank] = witness
            if len(found) == len(self._peers) or self._state.stop.is_set():
                break
            if time.monotonic() > until:
                for rank in self._peers:
                    if rank not in found:
                        found[rank] = witness_from_host(self._peers[rank], self._here)
                break
            time.sleep(_POLL_S)
        return [found[rank] for rank in sorted(found)]

    def _look(self, key: str) -> str | None:
        return cast("str | None", self._call(lambda s: look(s, key)))

    def _judge_alone(self) -> None:
        """The store is of no use: judge by what this host shows."""
        mine = witness_from_answer(self._peers[self._rank], self._own_answer())
        seen = [
            mine if r == self._rank else witness_from_host(p, self._here, asked=False)
            for r, p in sorted(self._peers.items())
        ]
        verdict, witnesses = self._judged(seen)
        self._publish_locally(verdict, witnesses)
        if verdict.fatal:
            self._adopt(verdict)

    def _judged(self, witnesses: list[Witness]) -> tuple[Verdict, list[Witness]]:
        suspects = self._state.suspects
        witnesses = [without_connection(w) if w.rank in suspects else w for w in witnesses]
        limits = self._trust.limits(self._recorder.median_step_s())
        blocked_s = max([self._stall.blocked_s, *(w.blocked_s for w in witnesses)])
        details = str(self._dump_path())
        verdict = judge(witnesses, limits, blocked_s=blocked_s, details=details)
        self._state.doubt = False
        # A broken connection does not heal.
        return replace(verdict, fatal=verdict.fatal or bool(suspects)), witnesses

    def _publish_locally(self, verdict: Verdict, witnesses: list[Witness]) -> bool:
        """Print what does not end the run, when it is time; keep the full evidence in a file."""
        limits = self._trust.limits(self._recorder.median_step_s())
        due = max(self._report_due_s, limits.first_report_s)
        if not verdict.fatal and self._stall.blocked_s < due:
            return False
        self._dump(verdict, witnesses)
        if not verdict.fatal:
            self._report_due_s = self._next_report_s()
            print(verdict.text, file=sys.stderr, flush=True)
        return True

    def _next_report_s(self) -> float:
        blocked_s = self._stall.blocked_s
        return next((t for t in (120.0, 300.0) if t > 1.5 * blocked_s), blocked_s + 600.0)

    def _dump_path(self) -> Path:
        root = self._trust.dump_dir or str(Path(tempfile.gettempdir()) / "zeroshard")
        return Path(root) / f"hang-{self._recorder.step}-{self._here.pid}.json"

    def _dump(self, verdict: Verdict, witnesses: list[Witness]) -> None:
        """The whole evidence beside the five lines: every rank's records and stacks."""
        path = self._dump_path()
        evidence = {"verdict": asdict(verdict), "witnesses": [asdict(w) for w in witnesses]}
        with contextlib.suppress(OSError):  # a full disk must not hide the verdict
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(evidence, indent=1))

    def _own_answer(self) -> dict[str, Any]:
        recorder = self._recorder
        flight = recorder.flight()
        keep = max(32, 4096 // len(self._peers))
        pending = recorder.oldest_pending()
        return {
            "flight": flight._replace(
                records=flight.records[-keep:], waiting=pending[0] if pending else 0
            ),
            "blocked_s": self._stall.blocked_s,
            "suspects": sorted(self._state.suspects),
            "stack": stack_line(self._main) if self._trust.stacks else "",
            "stacks": stacks() if self._trust.stacks else "",
        }

    def _adopt(self, verdict: Verdict) -> None:
        """A fatal verdict: tell the main thread, and wake it where it waits."""
        state = self._state
        if state.verdict is not None:
            return
        state.verdict = verdict
        self._deadline_s = time.monotonic() + self._trust.grace_s
        with contextlib.suppress(SideChannelLost):
            self._call(lambda s: s.add("read", 1), timeout_s=1.0)
        state.ready.set()
        for wake in self._wakers:
            with contextlib.suppress(Exception):
                wake()

    def _enforce(self, now_s: float) -> None:
        """A main thread that does not come to hear the verdict is ended with its process."""
        verdict, deadline_s = self._state.verdict, self._deadline_s
        if verdict is None or deadline_s is None or self._state.delivered.is_set():
            return
        if now_s > deadline_s:
            print(verdict.text, file=sys.stderr, flush=True)
            sys.stdout.flush()
            self._clean_up()
            os._exit(EXIT_VERDICT)

    def _clean_up(self) -> None:
        """Remove this rank's files; the last to leave this host removes those of its dead too.

        Until then a rank that judges alone still reads what the dead did last. Each removes its own
        first and looks at the others' after that, so of two that leave at once one sees itself last.
        """
        self._peers[self._rank].remove_files()
        here = [p for r, p in self._peers.items() if r != self._rank and p.is_on(self._here)]
        if all(peer.has_left(self._here) for peer in here):
            for peer in here:
                peer.remove_files()


def error_of(verdict: Verdict) -> Exception:
    """The exception a verdict stands for."""
    kind: type[Exception] = getattr(errors, verdict.kind, errors.DistributedError)
    return kind(verdict.text)


def divergence_text(odd: Sequence[int]) -> str:
    """What can be said when the hashes differ and nobody can be asked."""
    return (
        f"RankDivergence: {rank_ranges(odd)} called other collectives than the other ranks since "
        "the last check.\n  Run the same modules in the same order on every rank."
    )


def _watch(sentinel: weakref.ref[Sentinel], state: _State, tick_s: float) -> None:
    """The thread: holds the sentinel only while it looks, so that a forgotten engine can end."""
    complained = False
    if (strong := sentinel()) is not None:
        strong.enter_thread()
    del strong
    while not state.stop.is_set():
        state.kick.wait(tick_s)
        state.kick.clear()
        strong = sentinel()
        if strong is None or state.stop.is_set():
            return
        try:
            strong.tick()
        except Exception as error:  # the watch must not end because one look failed
            if not complained and not state.stop.is_set():
                complained = True
                print(f"zeroshard: the sentinel failed once: {error!r}", file=sys.stderr)
        del strong
