"""Runs several systems in turns on one machine, so that other load affects all of them equally.

Every system has a group of worker processes, one for each rank, that lives for the whole run. Groups
take turns in short bursts, forwards and backwards through the list. While one works, the others sleep.
The measure is the CPU time of the process (``time.process_time``: all its threads, without waiting). Load
on the machine changes it much less than wall time.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]

ANSWER_TIMEOUT_S = 300.0
"""A group that sends no answer for this time has failed."""

_PRELOADED = [
    *("torch", "torch.distributed", "torch.distributed.fsdp", "torch._dynamo"),
    "zeroshard.engine.initialize",  # importing zeroshard alone loads nothing
]


class Session(Protocol):
    """The work of one rank of a group."""

    def turn(self, request: Any) -> Any:
        """Run the request and return the measurements. Both can be pickled."""

    def close(self) -> None:
        """Release resources. All ranks call it at the same point."""


class Job(Protocol):
    """Builds a session. It can be pickled."""

    def prepare(self) -> None:
        """Import and open what must not count as memory of the system."""

    def open(self, rank: int) -> Session:
        """Build the session of one rank. ``torch.distributed`` is initialised."""


# ---------------------------------------------------------------------- one rank


def _run_rank(
    connection: Connection, job: Job, rank: int, ranks: int, threads: int, rendezvous_file: str
) -> None:
    try:
        _serve_requests(connection, job, rank, ranks, threads, rendezvous_file)
    except EOFError:
        pass  # the parent process has ended
    except BaseException as error:
        short = traceback.format_exception_only(error)[-1].strip()
        connection.send(("error", f"rank {rank}: {short}", traceback.format_exc()))


def _serve_requests(
    connection: Connection, job: Job, rank: int, ranks: int, threads: int, rendezvous_file: str
) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {key: str(value) for key, value in environment.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}  # read when DeepSpeed is imported
    warnings.filterwarnings(
        "ignore", category=FutureWarning
    )  # peers that use deprecated names of torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    store = dist.FileStore(rendezvous_file, ranks)  # type: ignore[attr-defined]
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
class WorkerGroup:
    """The worker processes of one system. ``peak_nbytes``: by phase, above the memory before building."""

    name: str
    job: Job
    ranks: int = 2
    threads: int = 1
    error: str = ""
    peak_nbytes: dict[str, int] = field(default_factory=dict)
    _connections: list[Connection] = field(default_factory=list)
    _processes: list[BaseProcess] = field(default_factory=list)
    _baseline_nbytes: int = 0

    def start(self, context: Any, folder: str, *, interval_s: float = 0.02) -> None:
        """Start the processes and build the session on all ranks. The caller starts one group at a
        time."""
        rendezvous_file = tempfile.mktemp(dir=folder)
        for rank in range(self.ranks):
            connection, child_connection = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(child_connection, self.job, rank, self.ranks, self.threads, rendezvous_file),
                daemon=True,
            )
            process.start()
            child_connection.close()
            self._connections.append(connection)
            self._processes.append(process)
        self._answers()
        if self.error:
            return
        self._baseline_nbytes = pss_nbytes(self._pids())
        with self.sampling_memory("construction", interval_s):
            self._ask(None)

    def turn(self, request: Any) -> list[Any]:
        """The measurements of every rank; an empty list if the group has failed."""
        return self._ask((request,))

    @contextlib.contextmanager
    def sampling_memory(self, phase: str, interval_s: float = 0.02) -> Iterator[None]:
        """Sample the memory of all ranks together. Sampling slows the ranks down: do not use it
        while time is measured."""
        found, stop, pids = [0], threading.Event(), self._pids()

        def sample() -> None:
            while not stop.wait(interval_s):
                found.append(pss_nbytes(pids) - self._baseline_nbytes)

        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.peak_nbytes[phase] = max(self.peak_nbytes.get(phase, 0), *found, 0)

    def stop(self) -> None:
        """End the processes. After an error they are terminated at once."""
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
        with contextlib.suppress(BrokenPipeError):  # _answers detects a rank that died
            for connection in self._connections:
                connection.send(request)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One message of every rank. After a failure: an empty list, and ``error`` is set."""
        answers: list[Any] = [None] * len(self._connections)
        missing = set(range(len(self._connections)))
        while missing and not self.error:
            ready = wait([self._connections[rank] for rank in missing], timeout=ANSWER_TIMEOUT_S)
            if not ready:
                self.error = f"no answer for {ANSWER_TIMEOUT_S:.0f} s"
            for connection in ready:
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                missing.discard(rank)
                try:
                    kind, *rest = self._connections[rank].recv()
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
    """Allocated memory of several processes together. A page that several of them map counts once.

    Private pages and pages of shared memory (``/dev/shm``, memfd) count. Mapped files of libraries do
    not. 0 if the system has no ``/proc/PID/smaps_rollup``.
    """
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # the process has ended, or this is not Linux
            continue
        for line in text.splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += 1024 * int(line.split()[1])
    return total


@contextlib.contextmanager
def running(groups: Sequence[WorkerGroup], say: Say, **options: Any) -> Iterator[None]:
    """Start the groups one after the other. On exit, stop all of them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        for group in groups:
            say(f"building {group.name}")
            stack.callback(group.stop)
            group.start(fork_server(), folder, **options)
        yield


def fork_server() -> Any:
    """The multiprocessing context. Its server imports torch once, before anything is measured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def interleaved(groups: Sequence[WorkerGroup], rounds: int) -> Iterator[tuple[int, WorkerGroup]]:
    """``(round, group)``: forwards, backwards, forwards... through the groups that have not failed."""
    return ((number, group) for number, group in alternating(groups, rounds) if not group.error)


def alternating(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """``(round, item)``: forwards, backwards, forwards... through the list. Drift of the machine then
    affects all items equally."""
    for number in range(rounds):
        for item in items if number % 2 == 0 else reversed(items):
            yield number, item


def step_ms(jobs: Mapping[str, Job], *, ranks: int, rounds: int, burst: int) -> dict[str, float]:
    """Median milliseconds of CPU time of all ranks together in a step, by name.

    Sessions answer a number of steps with the seconds of each.

    Raises:
        RuntimeError: a group has failed.
    """
    groups = [WorkerGroup(name, job, ranks=ranks) for name, job in jobs.items()]
    found: dict[str, list[float]] = {name: [] for name in jobs}
    with running(groups, print):
        for group in groups:
            group.turn(5)
        for _, group in interleaved(groups, rounds):
            found[group.name] += map(sum, zip(*group.turn(burst), strict=True))
        for group in groups:
            if group.error:
                raise RuntimeError(f"{group.name}: {group.error}")
    return {name: 1e3 * median(seconds) for name, seconds in found.items()}


class Clock:
    """CPU seconds of this process and wall seconds, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """``(cpu, wall)``."""
        return time.process_time() - self._cpu, time.perf_counter() - self._wall
