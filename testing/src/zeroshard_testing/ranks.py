"""Runs a test on several ranks, without starting new processes for each test.

    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @on_ranks(2)
    def test_ranks_agree(stage): ...

The body runs on every rank. Ranks are children of a fork server that has imported torch once. They live
for the whole test session. Each test gets a new process group, with a file as its store. After a failure
the ranks are killed, and the next test forks new ones.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import context, forkserver, get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from zeroshard.run.address import gloo_on_loopback, unused_port
from zeroshard_testing.outcome import GRACE_S, Outcome, RankEnd
from zeroshard_testing.worker import STACKS_SIGNAL, TestJob, TestReport, serve

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # the first optimizer step imports it, which takes 2 s
    "numpy",
    "pytest",
    "zeroshard.engine.initialize",  # importing zeroshard alone loads nothing
    __name__,
)
"""The modules that the fork server imports. Modules that cannot be imported are left out."""

_LOOPBACK = "127.0.0.1"

_Body = TypeVar("_Body", bound=Callable[..., Any])


class RanksFailed(Exception):
    """A body failed on at least one rank. The message begins with the rank that failed first."""


def on_ranks(
    n: int, *, timeout: float = 60.0, group: bool = True, backend: str = "gloo"
) -> Callable[[_Body], _Body]:
    """Run the decorated test on ``n`` ranks; it passes if it passes on all of them.

    Parameters and fixtures are sent as pickled values (``monkeypatch`` is refused). With
    ``group=False`` the body opens the process group. The variables of ``torchrun`` are set in both
    cases. ``timeout`` is in seconds.
    """

    def decorate(body: _Body) -> _Body:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            run_ranks(body, n, *args, kwargs=kwargs, timeout=timeout, group=group, backend=backend)

        test.rank_body = body  # type: ignore[attr-defined]
        return cast("_Body", test)

    return decorate


def run_ranks(
    body: Callable[..., Any],
    n: int,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    expect_death: Mapping[int, int | None] | None = None,
    keep_exceptions: bool = False,
    timeout: float = 60.0,
    group: bool = True,
    backend: str = "gloo",
) -> list[Any]:
    """Run ``body(*args, **kwargs)`` on ``n`` ranks and return what each returned, in rank order.

    ``expect_death`` maps ranks that must not return to a ``signal.Signals`` (``SIGSTOP``: frozen), an
    exit code, or None for any end; the result of such a rank is a :class:`RankEnd`. An exception on
    such a rank ends its process, as it would end a program. With ``keep_exceptions`` an exception is
    the result of its rank, and the other ranks may take the whole ``timeout`` (in seconds).

    Raises:
        RanksFailed: anything else: an exception, an unexpected end, a rank that is still blocked.
    """
    __tracebackhide__ = True
    expect_death = dict(expect_death or {})
    folder = tempfile.mkdtemp(prefix="zeroshard-ranks-")
    job = _job(
        body,
        pickled=_pickle_arguments(body, args, dict(kwargs or {})),
        world_size=n,
        backend=backend if group else None,
        folder=folder,
    )
    jobs = [
        replace(
            job,
            rank=rank,
            may_die=rank in expect_death,
            environ={**job.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(n)
    ]
    try:
        return pool().run(
            jobs,
            timeout_s=timeout,
            expect_death=expect_death,
            keep_exceptions=keep_exceptions,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def pool() -> RankPool:
    """The pool of this test session."""
    ranks = RankPool()
    atexit.register(ranks.kill)
    return ranks


class _Rank:
    """One process of the pool and the pipe to it."""

    def __init__(self, start: context.ForkServerContext) -> None:
        self.connection, theirs = start.Pipe()
        self.process = start.Process(target=serve, args=(theirs,))
        self.process.start()
        theirs.close()

    def read(self) -> Any:
        """The next message, or the end of the process. Waits if neither is there."""
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            return RankEnd(cast("int", self.process.exitcode))

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        self.process.close()

    def stops_before(self, deadline_s: float) -> bool:
        """Whether SIGSTOP reaches the process before the deadline (Linux). It has to poll."""
        while time.monotonic() < deadline_s:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
            if stat.rpartition(")")[2].split()[0] in "tT":
                return True
            time.sleep(0.005)
        return False


class RankPool:
    """The processes that become ranks. It does one run at a time."""

    def __init__(self) -> None:
        self._start = get_context("forkserver")
        self._ranks: list[_Rank] = []

    def __len__(self) -> int:
        """How many ranks are alive."""
        return len(self._ranks)

    def warm(self) -> None:
        """Start the fork server, without waiting until it has imported torch."""
        self._start.set_forkserver_preload(list(PRELOAD))
        forkserver.ensure_running()

    def kill(self) -> None:
        """Kill all ranks. The next run forks new ones."""
        while self._ranks:
            self._ranks.pop().kill()

    def run(
        self,
        jobs: Sequence[TestJob],
        *,
        timeout_s: float,
        expect_death: Mapping[int, int | None],
        keep_exceptions: bool,
    ) -> list[Any]:
        """Run the jobs and return their results; see :func:`run_ranks`."""
        __tracebackhide__ = True
        self.warm()
        while len(self._ranks) < len(jobs):
            self._ranks.append(_Rank(self._start))
        ranks = self._ranks[: len(jobs)]
        try:
            for rank, job in zip(ranks, jobs, strict=True):
                rank.connection.send(job)
            frozen = {r for r, how in expect_death.items() if how == signal.SIGSTOP}
            ends = _collect(
                ranks,
                frozen=frozen,
                timeout_s=timeout_s,
                grace_s=timeout_s if keep_exceptions else GRACE_S,
                expect_death=expect_death,
            )
            verdict = Outcome(jobs, ends, expect_death, keep_exceptions=keep_exceptions)
            if verdict.failed:
                raise RanksFailed(
                    verdict.text(
                        timeout_s=timeout_s,
                        ask_for_stacks=lambda r: _ask_for_stacks(ranks[r], jobs[r].output),
                    )
                )
            if verdict.skipped is not None:
                _skip(verdict.skipped)
            if verdict.all_returned:
                _end(ranks)
            else:
                self.kill()
            verdict.show_outputs()
            return verdict.results
        except BaseException:  # a failure, Ctrl-C, the timeout of the test runner
            self.kill()
            raise


def _collect(
    ranks: Sequence[_Rank],
    *,
    frozen: Iterable[int],
    timeout_s: float,
    grace_s: float,
    expect_death: Mapping[int, int | None],
) -> dict[int, TestReport | RankEnd]:
    """How each rank ended, by rank; a rank that is missing is still blocked.

    The first unexpected end shortens the deadline, because the other ranks may wait for the failed one.
    """
    ends: dict[int, TestReport | RankEnd] = {}
    by_connection = {rank.connection: r for r, rank in enumerate(ranks)}
    deadline_s = time.monotonic() + timeout_s
    while set(by_connection.values()) - set(frozen):
        ready = wait(list(by_connection), max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for connection in cast("list[Connection]", ready):
            r = by_connection.pop(connection)
            ends[r] = end = ranks[r].read()
            if r not in expect_death and not (isinstance(end, TestReport) and end.kind == "result"):
                deadline_s = min(deadline_s, time.monotonic() + grace_s)
    for r in set(frozen) - ends.keys():
        if ranks[r].stops_before(deadline_s):
            ends[r] = RankEnd(-signal.SIGSTOP)
    return ends


def _end(ranks: Sequence[_Rank]) -> None:
    """Let the ranks close their sockets, since all have returned, and collect what they leaked.

    Raises:
        RanksFailed: a rank leaked something, or died at the end.
    """
    __tracebackhide__ = True
    for rank in ranks:
        rank.connection.send("end")
    leaked = [rank.read() for rank in ranks]
    text = [
        f"rank {r}: {line}"
        for r, lines in enumerate(leaked)
        for line in ([f"died at the end: {lines}"] if isinstance(lines, RankEnd) else lines)
    ]
    if text:
        raise RanksFailed("The body passed but left something behind:\n" + "\n".join(text))


def _skip(reason: str) -> NoReturn:
    import pytest

    pytest.skip(reason)


def _ask_for_stacks(rank: _Rank, output: Path) -> None:
    """Make the rank write its stacks, also inside a C call. Waits for them for at most half a second."""
    if rank.process.pid is None or rank.process.exitcode is not None:
        return
    size = output.stat().st_size if output.exists() else 0
    os.kill(rank.process.pid, STACKS_SIGNAL)
    deadline_s = time.monotonic() + 0.5
    while time.monotonic() < deadline_s and (not output.exists() or output.stat().st_size == size):
        time.sleep(0.01)


def _job(
    body: Callable[..., Any],
    *,
    pickled: bytes,
    world_size: int,
    backend: str | None,
    folder: str,
) -> TestJob:
    body = inspect.unwrap(body, stop=lambda f: not hasattr(f, "rank_body"))
    module, qualname = body.__module__, body.__qualname__
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or "<" in qualname:
        raise TypeError(
            f"{module}.{qualname} cannot run on ranks: they find it by file and name. "
            "Define it at the top level of a module or in a class."
        )
    return TestJob(
        file=str(Path(file).resolve()),
        module=module,
        qualname=qualname,
        arguments=pickled,
        rank=0,
        world_size=world_size,
        backend=backend,
        folder=folder,
        environ=_environ(world_size),
        path=list(sys.path),
        cwd=os.getcwd(),
        seed=zlib.crc32(f"{module}.{qualname}".encode()),
        may_die=False,
    )


def _environ(world_size: int) -> dict[str, str]:
    """This process's variables and those of ``torchrun``, except ``RANK`` and ``LOCAL_RANK``."""
    return {
        **gloo_on_loopback(),
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(unused_port()),
    }


def _pickle_arguments(
    body: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bytes:
    named = [*enumerate(args), *kwargs.items()]
    for name, value in named:
        if type(value).__name__ == "MonkeyPatch":  # the copy on the rank would never be undone
            raise TypeError(
                f"{body.__qualname__} runs on ranks, and so would the copy of its argument {str(name)!r} "
                "(MonkeyPatch): what it replaced would stay replaced for the tests that follow. In "
                "the body, write `with pytest.MonkeyPatch.context() as patch:`."
            )
    try:
        return pickle.dumps((args, kwargs))
    except Exception:
        bad = [f"{name} ({type(value).__name__})" for name, value in named if not _travels(value)]
        raise TypeError(
            f"{body.__qualname__} runs on ranks: its arguments travel as pickles, and "
            f"{', '.join(bad)} cannot. Pass plain values and build the rest in the body."
        ) from None


def _travels(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
