"""Starts the watchdog of a set of ranks, and reports ranks that do not join before there is one."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from zeroshard.comm.agreement import Store, exchange
from zeroshard.comm.connect import default_store
from zeroshard.comm.host import hung_up, open_sockets
from zeroshard.comm.recorder import recording_dir
from zeroshard.errors import RankLate
from zeroshard.watchdog.diagnosis import Diagnosis, Limits, RankStatus, Wait, diagnose
from zeroshard.watchdog.rank_status import PRESENCE, stack_line
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.watchdog import Watchdog, error_of, hold

#: The watchdogs of this process, by the global ranks that they watch. Process-wide, as they watch
#: the main thread. A watchdog lives as long as a session that it follows, or as long as it is held.
_RUNNING: weakref.WeakValueDictionary[tuple[int, ...], Watchdog] = weakref.WeakValueDictionary()


def watchdog_of(ranks: tuple[int, ...], trust: WatchdogSettings, space: str) -> Watchdog:
    """The watchdog over these global ranks; started if there is none. Does not wait for other ranks.

    ``space``: the prefix in the store of the keys of this attempt at the run.
    """
    found = _RUNNING.get(ranks)
    if found is not None and found.usable:
        return found
    if found is not None:
        found.close()
    store = default_store()
    rank = dist.get_rank()
    before = open_sockets()
    client = own_client(store)
    port = getattr(_bottom(store), "port", None)
    sockets = {fd: what for fd, what in open_sockets().items() if before.get(fd) != what}
    group = weakref.ref(store)
    run = "-".join(space.split("/")[1:2]) or "run"
    _RUNNING[ranks] = watchdog = Watchdog(
        cast("Store", PrefixStore(watchdog_namespace(ranks, space), client)),
        rank=rank,
        ranks=ranks,
        recording=recording_dir(f"{run}-{secrets.token_hex(4)}") / PRESENCE,
        trust=trust,
        store_rank=_store_rank(store),
        over=lambda: group() is None or not dist.is_initialized(),
        hung_up=functools.partial(hung_up, sockets, port),
    )
    return watchdog


def watch_from_now_on(space: str) -> None:
    """Keep a watchdog over all ranks as long as their process group lives, with or without sessions."""
    trust = WatchdogSettings().with_environment()
    if trust.watchdog and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        hold(watchdog_of(tuple(range(dist.get_world_size())), trust, space))


def watchdog_namespace(ranks: Sequence[int], space: str) -> str:
    """The prefix in the store of the messages between the watchdogs of these ranks."""
    return f"{space}/sentinel/{','.join(map(str, ranks))}"


def own_client(store: Any) -> Any:
    """A second connection to ``store``, because a client that two threads share deadlocks."""
    return store.clone() if hasattr(store, "clone") else store


def await_all(store: Store, rank: int, world_size: int, *, timeout_s: float) -> None:
    """Return when all ranks have called ``init_distributed``. Before that there is no watchdog.

    Raises:
        RankLate: some ranks did not call it in time; it names them.
    """
    waiting = Waiting(rank, world_size, timeout_s)
    try:
        exchange(
            store, rank, world_size, "", key="joined", timeout_s=timeout_s + 60, check=waiting.look
        )
    except RankLate as error:  # later ranks must fail too: these ranks have gone
        store.set("gave up", str(error))
        raise
    if store.check(["gave up"]):
        raise RankLate(store.get("gave up").decode())


def await_server(
    host: str, port: int, rank: int, world_size: int, *, timeout_s: float, server: str
) -> None:
    """Return when the store at ``host:port`` can be reached.

    ``server``: "rank 0" if that rank serves the store, "" if the launcher does.

    Raises:
        RankLate: the store cannot be reached within ``timeout_s``.
    """
    waiting = Waiting(rank, world_size, timeout_s, reporter=1)
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        waiting.look([0] if server else [], f"the store at {host}:{port} ({why})")
        time.sleep(0.05)


class Waiting:
    """One wait for ranks that have not joined. Reports when it takes long and raises at ``timeout_s``."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, reporter: int | None = None
    ) -> None:
        self._rank = rank
        self._reporter = reporter
        self._ranks = range(world_size)
        self._trust = WatchdogSettings(collective_timeout_s=timeout_s).with_environment()
        self._main = threading.get_ident()
        self._begun_s = time.monotonic()
        self._due_s = self._trust.limits().first_report_s

    def look(self, missing: Sequence[int], what: str = "init_distributed") -> None:
        """Report, or raise the diagnosis, if it is time. One rank reports for all that wait."""
        waited_s = time.monotonic() - self._begun_s
        if waited_s < min(self._due_s, self._trust.collective_timeout_s):
            return
        self._due_s = max(2 * self._due_s, waited_s + 60.0)
        diagnosis = self._diagnosis(missing, waited_s, what)
        if diagnosis.fatal:
            raise error_of(diagnosis)
        reporter = self._reporter
        if self._rank == (min(set(self._ranks) - set(missing)) if reporter is None else reporter):
            print(diagnosis.text, file=sys.stderr, flush=True)

    def _diagnosis(self, missing: Sequence[int], waited_s: float, what: str) -> Diagnosis:
        here = Wait("joining", 1, what)
        line = stack_line(self._main)
        absent = "has not come to init_distributed. Look at its output"
        seen = [
            RankStatus(rank, None, fate="absent", detail=absent, answered=False)
            if rank in missing
            else RankStatus(rank, None, wait=here, stack=line, answered=rank == self._rank)
            for rank in self._ranks
        ]
        limit_s = self._trust.collective_timeout_s
        limits = Limits(
            timeout_s=limit_s, stuck_s=limit_s, timeout_key="init_distributed(timeout=...)"
        )
        return diagnose(seen, limits, blocked_s=waited_s, label=here.label)


def _bottom(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _store_rank(store: Any) -> int | None:
    """The rank that serves the store; None if the launcher serves it or if it is a file."""
    return 0 if isinstance(_bottom(store), TCPStore) and not launcher_serves() else None


def launcher_serves() -> bool:
    """Whether the agent of the launcher serves the store that the ranks meet through."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
