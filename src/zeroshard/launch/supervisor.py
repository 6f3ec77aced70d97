"""Supervises the processes of a run, and ends them in order when one fails or the user interrupts.

A :class:`WorkerSupervisor` watches processes that the launcher itself started, and no others:

    RUNNING --a process fails--> GRACE --time is up--> STOPPING (TERM) --time is up--> KILLING (KILL)
       \\--------------- interrupt(signal): forwarded ----/^    interrupt again ------/^

With time to save (``save_s``), the user's first signal leads to SAVING. It goes to the processes alone,
not to the workers of their data loaders. When the time is up, or after another signal: STOPPING.

In GRACE the survivors may end by themselves, with a diagnosis that says where they were. A process that
a signal has stopped (SIGSTOP) cannot do so and would never receive SIGTERM: it is killed when GRACE or
STOPPING begins, and its exit is marked as ``frozen``. While others run it is only named; when all others
have ended, it is killed after ``alone_s``.
:meth:`~WorkerSupervisor.tick` never blocks; the caller sleeps between two ticks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from zeroshard.memory.host_limits import is_stopped
from zeroshard.run.exit_report import RankExit


class WorkerProcess(Protocol):
    """The part of :class:`subprocess.Popen` that the supervisor uses."""

    pid: int

    def poll(self) -> int | None: ...


class Phase(Enum):
    """The phases of a run and of its end."""

    RUNNING = 0
    GRACE = 1
    STOPPING = 2
    KILLING = 3
    SAVING = 4


@dataclass(frozen=True, slots=True)
class ShutdownTimeouts:
    """The time limits of the phases of the end, in seconds."""

    grace_s: float = 5.0  # time for survivors of a failure to end by themselves
    stop_s: float = 30.0  # time between the request to stop and SIGKILL
    save_s: float = 0.0  # time to save after the user's signal; 0: it is a request to stop
    alone_s: float = 60.0  # time that stopped processes may take to go on when no other is left


Send = Callable[[int, WorkerProcess, signal.Signals], None]

_STOPPED_S = 2.0
"""A process that is stopped for less is not worth a line."""


def signal_group(_: int, process: WorkerProcess, number: signal.Signals) -> None:
    """Signal the process group of a process, which must lead its session (and may be a zombie)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def signal_leader(_: int, process: WorkerProcess, number: signal.Signals) -> None:
    """Signal a process, and not its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process.pid, number)


class WorkerSupervisor:
    """Supervises ``processes`` by rank. The caller has started them; each leads its own session.

    ``send`` delivers a signal to a process, ``ask`` one that asks it to save. ``clock`` gives the time in
    seconds; ``stopped`` says whether a signal has stopped the process with an id. ``say`` tells the user.
    """

    def __init__(
        self,
        processes: Mapping[int, WorkerProcess],
        *,
        timeouts: ShutdownTimeouts,
        send: Send = signal_group,
        ask: Send = signal_leader,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[int], bool] = is_stopped,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._alive = dict(processes)
        self._patience = timeouts
        self._send, self._ask = send, ask
        self._clock = clock
        self._is_stopped = stopped
        self._say = say
        self._look_s = 0.0
        self._stopped_s: dict[int, float] = {}  # rank -> when it was first seen stopped
        self._alone_since_s: float | None = None  # all that are left are stopped since then
        self._named: set[int] = set()  # stopped ranks that the user was told of
        self._frozen: set[int] = set()  # ranks that were killed because a signal had stopped them
        self._deadline_s = float("inf")
        self._told: set[int] = set()  # ranks that were alive when the launcher asked them to stop
        self.phase = Phase.RUNNING
        self.interrupted: signal.Signals | None = None  # the user's signal, if it ended the run
        self.is_asked_to_end = False  # the user sent a signal, before or after a failure
        self.deaths: list[RankExit] = []

    @property
    def has_saved(self) -> bool:
        """Whether the processes had time to save after the user's signal, and ended without an error."""
        asked = self.interrupted is not None and self._patience.save_s > 0
        return asked and not any(death.exitcode for death in self.deaths)

    @property
    def alive(self) -> dict[int, WorkerProcess]:
        """The processes that had not ended at the last tick, by rank."""
        return dict(self._alive)

    def tick(self) -> bool:
        """Record the processes that ended since the last call, and enter the next phase if it is time.

        True when no process is left.
        """
        now_s = self._clock()
        for rank, process in list(self._alive.items()):
            code = self._ended(rank, process)
            if code is not None:
                del self._alive[rank]
                frozen = rank in self._frozen
                told = rank in self._told and not frozen
                self.deaths.append(RankExit(rank, code, now_s, stopped=told, frozen=frozen))
        if self.phase is Phase.RUNNING and now_s >= self._look_s:
            self._look_s = now_s + 1.0
            self._note_stopped(now_s)
        failed = any(death.exitcode != 0 for death in self.deaths)
        if self.phase in (Phase.RUNNING, Phase.SAVING) and failed:
            self._enter(Phase.GRACE, now_s + self._patience.grace_s)
            self._kill_frozen()
        elif self.phase in (Phase.GRACE, Phase.SAVING) and now_s >= self._deadline_s:
            self._order(signal.SIGTERM, now_s)
        elif now_s >= self._deadline_s:
            self._enter(Phase.KILLING, now_s + self._patience.stop_s)
            self._tell(signal.SIGKILL)
        return not self._alive

    def fail(self) -> None:
        """A process on another node has failed: those here have time to end, and are stopped then."""
        if self.phase is Phase.RUNNING:
            self._enter(Phase.GRACE, self._clock() + self._patience.grace_s)
            self._kill_frozen()

    def interrupt(self, number: signal.Signals) -> None:
        """Forward the user's signal to all processes. If they were asked to stop before, kill them."""
        now_s = self._clock()
        self.is_asked_to_end = True
        if self.phase is Phase.RUNNING and self._patience.save_s:
            self.interrupted = number
            self._enter(Phase.SAVING, now_s + self._patience.save_s)
            self._kill_frozen()
            self._tell(number, self._ask)
        elif self.phase is Phase.SAVING:
            self._order(signal.SIGTERM, now_s)
        elif self.interrupted is None and self.phase in (Phase.RUNNING, Phase.GRACE):
            self.interrupted = number if self.phase is Phase.RUNNING else None
            self._order(number, now_s)
        else:
            self._enter(Phase.KILLING, now_s + self._patience.stop_s)
            self._tell(signal.SIGKILL)

    def _ended(self, rank: int, process: WorkerProcess) -> int | None:
        """The exit code of a process that ended; None if it runs.

        What is left of the group of a failed process (data-loader workers) is killed before the process
        is reaped: until then no other process can get its id.
        """
        if isinstance(process, subprocess.Popen) and hasattr(os, "waitid"):
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            try:
                seen = os.waitid(os.P_PID, process.pid, flags)
            except ChildProcessError:
                return process.poll()
            if seen is None:
                return None
            if seen.si_code != os.CLD_EXITED or seen.si_status != 0:
                self._send(rank, process, signal.SIGKILL)
        return process.poll()

    def _order(self, number: signal.Signals, now_s: float) -> None:
        self._enter(Phase.STOPPING, now_s + self._patience.stop_s)
        self._kill_frozen()
        self._tell(number)

    def _note_stopped(self, now_s: float) -> None:
        """Name processes that a signal has stopped, unless all are (the user stopped the run)."""
        stopped = {rank for rank, process in self._alive.items() if self._is_stopped(process.pid)}
        self._stopped_s = {rank: self._stopped_s.get(rank, now_s) for rank in sorted(stopped)}
        self._named &= stopped
        if stopped == set(self._alive) and not self.deaths:
            return
        for rank, since_s in self._stopped_s.items():
            if rank not in self._named and now_s - since_s >= _STOPPED_S:
                self._named.add(rank)
                pid = self._alive[rank].pid
                self._say(
                    f"rank {rank} is stopped by a signal, and the others wait for it: `kill -CONT {pid}` "
                    "lets it go on."
                )
        if not stopped or stopped != set(self._alive):
            self._alone_since_s = None
            return
        # Not from the stop on: a rank may be stopped for almost this long while others still run.
        if self._alone_since_s is None:
            self._alone_since_s = now_s
        if now_s - self._alone_since_s >= self._patience.alone_s:
            self._kill_frozen()

    def _kill_frozen(self) -> None:
        for rank, process in self._alive.items():
            if rank not in self._frozen and self._is_stopped(process.pid):
                self._frozen.add(rank)
                self._send(rank, process, signal.SIGKILL)

    def _tell(self, number: signal.Signals, send: Send | None = None) -> None:
        for rank, process in self._alive.items():
            self._told.add(rank)
            (send or self._send)(rank, process, number)

    def _enter(self, phase: Phase, deadline_s: float) -> None:
        self.phase = phase
        self._deadline_s = deadline_s
