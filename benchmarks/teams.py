"""How do several programs share a machine so that whatever else it does meets all of them?

Every system is a team of processes that lives for the whole run. Teams take turns in short bursts,
forwards and backwards through the list; while one works, the others sleep. The measure is CPU time
of the process (``time.process_time``: all its threads, waiting not included), which a loaded machine
changes much less than wall time.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]

PATIENCE_S = 300.0
"""A team that answers nothing for so long has failed."""

_PRELOADED = [
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo"),
    "zeroshard.engine.initialize",  # importing zeroshard alone loads nothing
]


class Session(Protocol):
    """What one rank of a team does when its turn comes."""

    def turn(self, request: Any) -> Any:
        """Do what is asked for and return what was measured (anything that pickles)."""

    def close(self) -> None:
        """End in order; other ranks do the same."""


class Job(Protocol):
    """A picklable recipe of a session."""

    def prepare(self) -> None:
        """Import and open what the process keeps in any case: it does not count as memory."""

    def open(self, rank: int) -> Session:
        """Build the session of one rank. ``torch.distributed`` is initialised."""


# ---------------------------------------------------------------------- one rank


def _work(
    connection: Connection, job: Job, rank: int, ranks: int, threads: int, meeting: str
) -> None:
    try:
        _serve(connection, job, rank, ranks, threads, meeting)
    except EOFError:
        pass  # the program that asks has gone
    except BaseException as error:
        short = traceback.format_exception_only(error)[-1].strip()
        connection.send(("error", f"rank {rank}: {short}", traceback.format_exc()))


def _serve(
    connection: Connection, job: Job, rank: int, ranks: int, threads: int, meeting: str
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # read when DeepSpeed is imported
    warnings.filterwarnings("ignore", category=FutureWarning)  # peers under newer names of torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    store = dist.FileStore(meeting, ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    job.prepare()
    connection.send(("prepared", None))
    connection.recv()
    session = job.open(rank)
    connection.send(("ready", None))
    while (request := connection.recv()) is not None:
        connection.send(("done", session.turn(request[0])))
    session.close()
    dist.destroy_process_group()
    connection.send(("closed", None))


# ---------------------------------------------------------------------- all ranks of one system


@dataclass(eq=False)
class Team:
    """The ranks of one system. ``peak_nbytes``: by phase, above what the processes had before."""

    name: str
    job: Job
    ranks: int = 2
    threads: int = 1
    error: str = ""
    peak_nbytes: dict[str, int] = field(default_factory=dict)
    _ends: list[Connection] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)
    _before_nbytes: int = 0

    def start(self, context: Any, folder: str, *, interval_s: float = 0.02) -> None:
        """Build the session on all ranks, one team at a time."""
        meeting = tempfile.mktemp(dir=folder)
        for rank in range(self.ranks):
            end, far = context.Pipe()
            process = context.Process(
                target=_work,
                args=(far, self.job, rank, self.ranks, self.threads, meeting),
                daemon=True,
            )
            process.start()
            far.close()
            self._ends.append(end)
            self._processes.append(process)
        self._answers()
        if self.error:
            return
        self._before_nbytes = pss_nbytes(self._pids())
        with self.watched("construction", interval_s):
            self._ask(None)

    def turn(self, request: Any) -> list[Any]:
        """What every rank measured; an empty list once the team has failed."""
        return self._ask((request,))

    @contextlib.contextmanager
    def watched(self, phase: str, interval_s: float = 0.02) -> Iterator[None]:
        """Sample the memory of all ranks together. It costs them time: not while that is measured."""
        found, stop, pids = [0], threading.Event(), self._pids()

        def sample() -> None:
            while not stop.wait(interval_s):
                found.append(pss_nbytes(pids) - self._before_nbytes)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.peak_nbytes[phase] = max(self.peak_nbytes.get(phase, 0), *found, 0)

    def stop(self) -> None:
        """End the ranks: politely, or at once after an error."""
        if not self.error:
            self._ask(None)
        for process in self._processes:
            if self.error:
                process.terminate()
            process.join(30)
            process.kill()
        self._processes = []

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def _ask(self, request: Any) -> list[Any]:
        if self.error:
            return []
        with contextlib.suppress(BrokenPipeError):  # a rank that died is found by its silence
            for end in self._ends:
                end.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One message of every rank, or none of them and ``error``."""
        answers: list[Any] = [None] * len(self._ends)
        missing = set(range(len(self._ends)))
        while missing and not self.error:
            ready = wait([self._ends[rank] for rank in missing], timeout=PATIENCE_S)
            if not ready:
                self.error = f"no answer for {PATIENCE_S:.0f} s"
            for end in ready:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                missing.discard(rank)
                try:
                    kind, *rest = self._ends[rank].recv()
                except EOFError:
                    self.error = self.error or f"rank {rank} died"
                    break
                if kind == "error":
                    self.error = rest[0]
                    print(rest[1])
                answers[rank] = rest[0]
        if self.error:
            for process in self._processes:
                process.terminate()
            return []
        return answers


def pss_nbytes(pids: Sequence[int]) -> int:
    """Memory of several processes together, each page counted once among those that map it.

    Allocated memory: private pages and those shared between processes (``/dev/shm``, memfd), not the
    mapped files of libraries. 0 where the system does not say.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # the process has ended, or this is no Linux
            continue
        for line in text.splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += 1024 * int(line.split()[1])
    return total


@contextlib.contextmanager
def running(teams: Sequence[Team], say: Say, **options: Any) -> Iterator[None]:
    """Start the teams one after the other, and end them all in the end."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as ends:
        for team in teams:
            say(f"building {team.name}")
            ends.callback(team.stop)
            team.start(fork_server(), folder, **options)
        yield


def fork_server() -> Any:
    """The context of all processes: torch is imported once, before anything is measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def in_turns(teams: Sequence[Team], rounds: int) -> Iterator[tuple[int, Team]]:
    """Forwards, backwards, forwards... through the teams that still work."""
    return ((number, team) for number, team in to_and_fro(teams, rounds) if not team.error)


def to_and_fro(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Forwards, backwards, forwards... through the list: drift of the machine meets all of it."""
    for number in range(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield number, item


class Clock:
    """CPU seconds of this process and wall seconds, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """``(cpu, wall)``."""
        return time.process_time() - self._cpu, time.perf_counter() - self._wall
