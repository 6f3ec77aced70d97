"""What the watchdog follows of one session: its sequences of calls, and its explanations of errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroshard.comm.collectives import lost_text
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.recorder import Item, Recorder, StepMarks
from zeroshard.errors import RankDivergence, RankLost
from zeroshard.watchdog.lone_reads import LoneReadCheck
from zeroshard.watchdog.messages import StoreLost
from zeroshard.watchdog.pace import Pace
from zeroshard.watchdog.rank_status import Peers
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stop_agreement import StopAgreement
from zeroshard.watchdog.stop_signals import StopSignals
from zeroshard.watchdog.tracked_calls import TrackedCalls
from zeroshard.watchdog.watchdog import Watchdog


class SessionWatch:
    """The sequences of one :class:`~.comm_session.CommSession`.

    ``peers``: every rank's process and the path of its recording, by global rank. ``parts``: the
    sequences, first the collectives over all ranks.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        label: str,
        settings: WatchdogSettings,
        peers: Peers,
        parts: Sequence[TrackedCalls],
    ) -> None:
        self.label = label
        self.settings = settings
        self.peers = peers
        self.parts = list(parts)
        self.errands: list[Callable[[], None]] = []  # run at each look, in the watchdog's thread
        self.pace: Pace | None = None
        self._failed = (-1, "")  # the step in which a call ended with an error, and the error
        self._is_closed = False
        self._watchdog = watchdog
        watchdog.follow(self)

    def start(self, *wakers: Callable[[], object]) -> None:
        """Note ``wakers``, which wake the main thread after a fatal diagnosis.

        Called when the recordings of all ranks exist.
        """
        # A process whose files cannot be seen is in another container: treat it as on another host.
        self.peers = self.peers.with_near(
            {
                r: p.far()
                for r, p in self.peers.near.items()
                if p.process.space and not Path(p.recording).exists()
            }
        )
        for part in self.parts:
            part.peers = (
                self.peers
                if not part.members
                else {
                    rank: replace(self.peers[rank], recording=part.peers[rank].recording)
                    for rank in part.members
                }
            )
            if part.collective:
                part.wakers = wakers

    def check_wait(self) -> None:
        """Raise the fatal diagnosis, if there is one: a wait for the device may have been cut short."""
        if not self._is_closed:
            self._watchdog.check_wait()

    def note_failure(self, text: str) -> None:
        """Note that a call of the current step ended with an error."""
        self._failed = (self._step, text)

    def failure(self) -> str:
        """The error that a call of the current step ended with; "" if there is none."""
        step, text = self._failed
        return text if step == self._step else ""

    @property
    def _step(self) -> int:
        recorder = self.parts[0].recorder
        return -1 if recorder is None else recorder.step

    def part_of(self, recorder: Recorder) -> TrackedCalls:
        """The collectives that ``recorder`` records."""
        return next(part for part in self.parts if part.recorder is recorder)

    def explainer(self, recorder: Recorder) -> PartExplainer:
        """The error explainer of the transport that ``recorder`` records."""
        return PartExplainer(self._watchdog, self.part_of(recorder))

    def ask(self, peers: Sequence[int] = ()) -> Exception | None:
        """The diagnosis of a broken connection to ``peers``, or of the program; None: not known."""
        return self._watchdog.explain(self.parts[0], peers)

    def settle(self, part: TrackedCalls, odd: Sequence[int]) -> Exception:
        """The exception for histories of the ranks ``odd`` that differ from those of the others."""
        return self._watchdog.settle(part) or RankDivergence(divergence_text(odd))

    def readers(self, recorder: Recorder) -> LoneReadCheck:
        """A check whether all ranks read sharded values together. Every rank has to use it.

        ``recorder`` has the collectives of the session.
        """
        label, ranks, watchdog = self.label, tuple(self.peers), self._weak_watchdog()

        def call(operation: Callable[[Any], Any]) -> Any:
            return watchdog().messages.call(operation)

        readers = LoneReadCheck(
            call,
            label=label,
            rank=ranks.index(recorder.rank),
            size=len(ranks),
            position=lambda words: watchdog().position(words),
            history=lambda: f"{recorder.seq}-{recorder.hash64:x}",
            gone=lambda at: watchdog().why_gone(label, ranks[at]),
            report_s=self.settings.report_s(),
            limit_s=self.settings.collective_timeout_s,
            rung=lambda: watchdog().messages.rung,
        )
        self.errands.append(readers.answer)
        return readers

    def stop_agreement(self, signals: StopSignals, rank: int) -> StopAgreement:
        """The agreement of all ranks to stop after a signal to one of them. Every rank has to use it.

        ``rank``: the global rank of this process.
        """
        watchdog = self._weak_watchdog()

        def call(operation: Callable[[Any], Any]) -> Any:
            return watchdog().messages.call(operation)

        agreement = StopAgreement(
            signals,
            rank=rank,
            ranks=tuple(self.peers),
            label=self.label,
            call=call,
            check=lambda: watchdog().check(),
            rung=lambda: watchdog().messages.rung,
        )
        self.errands.append(agreement.look)
        return agreement

    def compare_pace(
        self, recorder: Recorder, waits: Sequence[Recorder], groups: Sequence[Sequence[int]]
    ) -> None:
        """Report ranks that are slower than the others of their group. Every rank has to use it.

        ``recorder``: of the collectives over all ranks. ``waits``: recorders whose waits are for other
        ranks. ``groups``: ranks with the same work. Incidents go to ``self.pace.listeners``.
        """
        watchdog, peers = self._weak_watchdog(), self.peers

        def call(operation: Callable[[Any], Any], timeout_s: float) -> Any:
            return watchdog().messages.call(operation, timeout_s)

        self.pace = Pace(
            call,
            recorder,
            StepMarks(waits),
            label=self.label,
            ranks=tuple(self.peers),
            groups=groups,
            host=lambda rank: peers[rank].process.host,
            ratio=self.settings.straggler_ratio,
            window=self.settings.straggler_window,
            tick_s=self.settings.tick_s,
        )
        self.errands.append(self.pace.look)

    def _weak_watchdog(self) -> Callable[[], Watchdog]:
        """Gives the watchdog, and does not keep it alive."""
        weak = weakref.ref(self._watchdog)

        def watchdog() -> Watchdog:
            if (strong := weak()) is None:
                raise StoreLost("the watchdog has ended")
            return strong

        return watchdog

    def tell_left(self, reason: str) -> None:
        """Tell the other ranks why this rank makes no further call, before its connections are closed.

        Else they find broken connections and a rank that still runs.
        """
        self._watchdog.tell_left(self, reason)

    def close(self, reason: str = "") -> None:
        """End the watch over this session. ``reason``: the exception that ended this rank's part."""
        self._is_closed = True
        self._watchdog.leave(self, reason)
        self._watchdog.release()


@dataclass(frozen=True, eq=False)
class PartExplainer:
    """The error explainer of one transport: asks what the ranks do in ``part``, its calls."""

    watchdog: Watchdog
    part: TrackedCalls

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """The exception for a connection to one of ``peers`` (global ranks) that broke in ``item``."""
        error = self.watchdog.explain(self.part, peers)
        return error or RankLost(lost_text(item, peers, detail))


def divergence_text(odd: Sequence[int]) -> str:
    """The message when hashes differ and no rank can be asked."""
    return (
        f"RankDivergence: {rank_ranges(odd)} called other collectives than the other ranks since "
        "the last check.\n  Run the same modules in the same order on every rank."
    )
