"""Runs the ranks of one node.

The agent of torch elastic does the rendezvous, assigns ranks and starts the processes. This file adds
the supervision of the processes (:class:`~zeroshard.launch.supervisor.WorkerSupervisor`), the handling
of their output, and the removal of what ranks that were killed have left. Only this file and
``common_store.py`` import torch elastic.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.utils.api import macros

from zeroshard.errors import LaunchError
from zeroshard.launch.common_store import (
    LOOPBACK,
    CommonStore,
    HostsPlace,
    StoreRendezvous,
    store_of_hosts,
    store_of_one_host,
)
from zeroshard.launch.guardian import Guardian
from zeroshard.launch.resources import bound
from zeroshard.launch.streams import Streams
from zeroshard.launch.supervisor import ShutdownTimeouts, WorkerSupervisor
from zeroshard.memory.host_limits import (
    host_limits,
    read_oom_counters,
    read_rss_nbytes,
    read_shm_nbytes,
)
from zeroshard.run.exit_report import (
    BLAME_VARIABLE,
    EXIT_SURVIVOR,
    ExitReport,
    KernelCounters,
    RankExit,
    build_report,
    read_blame,
)
from zeroshard.run.recordings import remove_if_ended
from zeroshard.run.run_folder import RUN_ID_VARIABLE, attempt, keep_exit

_TICK_S = 0.02
_RSS_EVERY_S = 1.0
_MOST_FILES = 1 << 16
"""Some programs have a table with a row for each descriptor that they might open."""
_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What the ranks of one node need. The command of a rank is ``program`` followed by ``arguments``."""

    program: str
    arguments: tuple[str, ...]
    num_local: int
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None  # None: a free port (one node only)
    secret: str = field(default="", repr=False)  # of the hosts of the run; "": there is none
    attempt: str = "0"  # keeps the keys of a late process of an earlier attempt apart
    pass_local_rank_at: int | None = None  # position of ``--local_rank=N`` among the arguments
    env: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's environment
    cpus: tuple[tuple[int, ...], ...] = ()  # by local rank; empty: all CPUs of the launcher
    log_dir: Path | None = None
    timeouts: ShutdownTimeouts = field(default_factory=ShutdownTimeouts)
    has_failed_elsewhere: Callable[[], bool] = lambda: False  # asked again and again
    verbose: bool = False


def run_node(run: NodeRun, console: TextIO) -> ExitReport:
    """Run the ranks of this node to their end and print the report; its exit code is the launcher's."""
    prefix = "zeroshard-launch-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch,
        many_open_files(),
        Guardian() as guardian,
        guardian.past(console) as direct,
    ):
        report = _run_node(run, direct, Path(scratch), guardian)
    env = {**os.environ, **run.env}
    kept = keep_exit(report, attempt(env), env)
    if kept is not None and not report.consequence:
        print(f"zeroshard: where each rank was: zeroshard explain {kept}", file=console, flush=True)
    return report


def _run_node(run: NodeRun, console: TextIO, scratch: Path, guardian: Guardian) -> ExitReport:
    before = read_oom_counters()
    memory = host_limits()
    # A single rank keeps the terminal (progress bars, debuggers). Lines of several ranks must not mix.
    outputs = sys.stdout.buffer if run.num_local * run.num_nodes > 1 else None
    streams = Streams(console.buffer, outputs, run.log_dir)
    watch = _Watch(run, streams, guardian)
    opened = ExitStack()
    try:
        _quiet_torch(run.verbose)
        with _signals(prompt=run.num_nodes > 1):
            common = opened.enter_context(_common_store(run))
            _make_agent(run, watch, _Logs(scratch, streams, run.env), common).run()
    except (SignalException, KeyboardInterrupt) as error:
        stopped_by = getattr(error, "sigval", signal.SIGINT)
        if watch.supervisor is None:
            streams.finish(release=True)
            text = f"stopped by {stopped_by.name} before any rank ran."
            print(f"zeroshard: {text}", file=console)
            return ExitReport((text,), None, "", int(128 + stopped_by), interrupted=True)
        watch.stop_now(stopped_by)
    except Exception as error:
        if not watch.deaths:
            streams.finish(release=True)
            raise _start_error(run, error) from error
    finally:
        opened.close()  # the ranks have ended
        run_id = run.env.get(RUN_ID_VARIABLE, os.environ.get(RUN_ID_VARIABLE, ""))
        remove_recordings(run_id, watch.ended_pids)
    limit = memory.cgroup.limit_nbytes if memory.cgroup else None
    kernel = KernelCounters(read_oom_counters().since(before), limit, read_shm_nbytes())
    report = _reported(watch, streams, scratch, kernel, console)
    if report.consequence and run.num_nodes > 1:
        report = replace(report, exitcode=EXIT_SURVIVOR)
    return report


def _reported(
    watch: _Watch, streams: Streams, scratch: Path, kernel: KernelCounters, console: TextIO
) -> ExitReport:
    """How the ranks of this node ended, which is also printed."""
    supervisor = watch.supervisor
    interrupted = None if supervisor is None else supervisor.interrupted
    saved = supervisor is not None and supervisor.has_saved
    streams.finish(release=not any(d.exitcode for d in watch.deaths) and interrupted is None)
    deaths = [_with_words(death, streams, scratch) for death in watch.deaths]
    report = build_report(deaths, kernel, interrupted=interrupted, saved=saved)
    _print(report, streams, console)
    if supervisor is not None and supervisor.is_asked_to_end:
        return replace(report, interrupted=True)
    return report


class _Watch:
    """The supervisor of this node's ranks once they run, and samples of their memory, one a second."""

    def __init__(self, run: NodeRun, streams: Streams, guardian: Guardian) -> None:
        self._guardian = guardian
        self._run = run
        self._streams = streams
        self._peak_nbytes: dict[int, int] = {}
        self._next_sample_s = 0.0
        # Signals that nohup made the launcher ignore stay ignored; torch's agent would handle them.
        self._ignored = {n for n in _HANDLED if signal.getsignal(n) is signal.SIG_IGN}
        self.supervisor: WorkerSupervisor | None = None
        self._pids: tuple[int, ...] = ()

    @property
    def deaths(self) -> list[RankExit]:
        """The processes that ended so far, in order, each with the memory that was last measured."""
        deaths = self.supervisor.deaths if self.supervisor else []
        return [replace(d, peak_rss_nbytes=self._peak_nbytes.get(d.rank)) for d in deaths]

    @property
    def ended_pids(self) -> set[int]:
        """The ids of the ranks' processes that have ended."""
        alive = self.supervisor.alive.values() if self.supervisor else ()
        return {*self._pids} - {process.pid for process in alive}

    def start(self, processes: Mapping[int, Any]) -> None:
        """Supervise the ranks, which have started, and handle the signals instead of torch's agent."""
        self._pids = tuple(process.pid for process in processes.values())
        self._guardian.watch(self._pids)
        self._streams.start()
        self.supervisor = WorkerSupervisor(
            processes, timeouts=self._run.timeouts, say=self._streams.say
        )
        if threading.current_thread() is threading.main_thread():
            for number in _HANDLED:
                ignored = number in self._ignored
                signal.signal(number, signal.SIG_IGN if ignored else self._on_signal)
            if self._run.timeouts.save_s:
                signal.signal(signal.SIGUSR1, self._on_signal)

    def tick(self) -> bool:
        """Sample memory and let the supervisor act. True when no rank is left."""
        supervisor = self.supervisor
        if supervisor is None:
            return True
        now_s = time.monotonic()
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + _RSS_EVERY_S
            for rank, process in supervisor.alive.items():
                nbytes = read_rss_nbytes(process.pid)
                if nbytes is not None:
                    self._peak_nbytes[rank] = nbytes
        if self._run.has_failed_elsewhere():
            supervisor.fail()
        ended = supervisor.tick()
        if supervisor.interrupted is not None or any(death.exitcode for death in supervisor.deaths):
            self._streams.fail()
        return ended

    def stop_now(self, number: signal.Signals) -> None:
        """End all ranks: ask, wait, kill."""
        if self.supervisor is not None:
            self.supervisor.interrupt(number)
            while not self.tick():
                time.sleep(_TICK_S)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.supervisor is not None:
            self.supervisor.interrupt(signal.Signals(number))


class _Agent(LocalElasticAgent):
    """Torch elastic's agent, which leaves the reaction to a failed rank to the supervisor."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, watch: _Watch) -> None:
        super().__init__(spec, logs_specs=logs)
        self._watch = watch

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = super()._start_workers(worker_group)
        handlers = self._pcontext.subprocess_handlers  # type: ignore[union-attr]
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        self._watch.start({ranks[local]: handler.proc for local, handler in handlers.items()})
        return ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._watch.tick():
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)
        return result


class _Logs(LogsSpecs):
    """Lets torch's agent open the pipes of :class:`Streams` as the outputs of the ranks."""

    def __init__(self, scratch: Path, streams: Streams, env: Mapping[str, str]) -> None:
        super().__init__(log_dir=str(scratch))
        self._scratch = scratch
        self._streams = streams
        self._env = env

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        dest = LogsDest()
        for local, env in envs.items():
            rank = int(env["RANK"])
            dest.stdouts[local], dest.stderrs[local] = self._streams.paths(rank)
            dest.error_files[local] = str(_error_file(self._scratch, rank))
            env.update(self._env)
            env["TORCHELASTIC_ERROR_FILE"] = dest.error_files[local]
            env[BLAME_VARIABLE] = str(_blame_file(self._scratch, rank))
        return dest

    @property
    def root_log_dir(self) -> str:
        return str(self._scratch)


@contextmanager
def _common_store(run: NodeRun) -> Iterator[CommonStore]:
    """A context with the store of one attempt. On one node its port is free, unless one is given."""
    if run.num_nodes == 1:
        yield store_of_one_host(run.master_addr or LOOPBACK, run.master_port or 0)
        return
    assert run.master_addr is not None, "plan_launch() gives it for several nodes"
    assert run.master_port is not None, "plan_launch() gives it for several nodes"
    place = HostsPlace(run.master_addr, run.master_port, run.secret, run.node_rank == 0)
    with store_of_hosts(place, await_hosts=run.num_nodes) as common:
        yield common


def _make_agent(run: NodeRun, watch: _Watch, logs: _Logs, common: CommonStore) -> _Agent:
    """An agent for one attempt."""
    name = f"zeroshard-{run.attempt}"
    rendezvous = StoreRendezvous(name, common, run.node_rank, run.num_nodes)
    # torch expands $-templates in arguments. Only the local rank is meant as a template.
    arguments = [argument.replace("$", "$$") for argument in run.arguments]
    if run.pass_local_rank_at is not None:
        arguments.insert(run.pass_local_rank_at, f"--local_rank={macros.local_rank}")
    words = [run.program, *arguments]
    if run.cpus:
        words = bound(run.cpus, macros.local_rank, words)
    spec = WorkerSpec(
        role="rank",
        local_world_size=run.num_local,
        entrypoint=words[0],
        args=tuple(words[1:]),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_TICK_S,
    )
    return _Agent(spec, logs, watch)


def _quiet_torch(verbose: bool) -> None:
    """Keep the agent's own log lines off the console, since the report has their content."""
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # read in this process too
    root = "torch.distributed.elastic"
    if not verbose:
        for name in [n for n in logging.root.manager.loggerDict if n.startswith(root)]:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


@contextmanager
def _signals(*, prompt: bool) -> Iterator[None]:
    """A context that restores the signal handlers at its end.

    ``prompt``: until the ranks run, Ctrl-C ends this process at once, because the process waits for other
    nodes in C++ code and would not run a handler.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*_HANDLED, signal.SIGUSR1)}
    try:
        for number in _HANDLED:
            if prompt and before[number] is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _with_words(death: RankExit, streams: Streams, scratch: Path) -> RankExit:
    """``death`` with the end of the rank's standard error, its error file and whom it blames."""
    try:
        error_file = _error_file(scratch, death.rank).read_text(errors="replace")
    except OSError:
        error_file = ""
    blame = read_blame(_blame_file(scratch, death.rank))
    return replace(death, stderr=streams.tail(death.rank), error_file=error_file, blame=blame)


def _error_file(scratch: Path, rank: int) -> Path:
    return scratch / f"error-{rank}.json"


def _blame_file(scratch: Path, rank: int) -> Path:
    return scratch / f"blame-{rank}.json"


def _print(report: ExitReport, streams: Streams, console: TextIO) -> None:
    for line in report.lines:
        print(f"zeroshard: {line}", file=console)
    rank = report.root if report.trace_rank is None else report.trace_rank
    if rank is not None and report.trace:
        shown_by = streams.shown_by(rank)
        if shown_by is not None:
            print(f"zeroshard: the traceback of rank {shown_by} is above.", file=console)
        else:
            print(f"--- rank {rank}\n{report.trace}", file=console)
    console.flush()


def _start_error(run: NodeRun, error: Exception) -> LaunchError:
    text = str(error) or type(error).__name__
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return LaunchError(
            f"port {run.master_port} on {run.master_addr} is in use, so the ranks cannot meet "
            "there. Give another one with --master_port, or end the program that uses it."
        )
    return LaunchError(f"the ranks of node {run.node_rank} could not be started: {text}")


def remove_recordings(run_id: str, pids: Collection[int], root: Path | None = None) -> None:
    """Remove the recordings of a run whose writers are all among ``pids``, which have ended.

    If all ranks of a host were killed, no rank is left to remove them, and a run that restarts often
    would leave more and more in ``/dev/shm``.
    """
    shared = Path("/dev/shm")
    place = root or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
    for folder in place.glob(f"zeroshard-{run_id}-" + "[0-9a-f]" * 8):
        with suppress(OSError):  # a rank has removed it
            remove_if_ended(folder, pids.__contains__)


@contextmanager
def many_open_files() -> Iterator[None]:
    """A context in which this process, and those that it starts, may open as many files as is allowed.

    Whoever reaches a port of torch's store, or of gloo, can open connections to it. Without a descriptor
    for one more, the store accepts no rank, and gloo ends its process.
    """
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if most == resource.RLIM_INFINITY else min(most, _MOST_FILES)
    if before == resource.RLIM_INFINITY or before >= wanted:
        yield
        return
    with suppress(OSError, ValueError):  # some systems have a lower limit than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))
