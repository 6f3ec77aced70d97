"""Joins this process to the ranks of its run, starts their watchdog, and reports missing ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast
from urllib.parse import urlparse

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.rendezvous import rendezvous

from zeroshard.comm.connect import default_store
from zeroshard.comm.env import (
    DEFAULT_TIMEOUT,
    RankInfo,
    an_agent_started_this,
    check_master,
    current_rank_info,
    default_backend,
    launcher_serves_store,
    meeting_place,
    rank_info_of,
    run_name,
)
from zeroshard.comm.host import hung_up, open_sockets, sibling_ranks
from zeroshard.comm.store_keys import Rendezvous
from zeroshard.comm.store_keys import Store as AgreeStore
from zeroshard.errors import LaunchError, RankLate, RankLost
from zeroshard.memory.host_limits import is_stopped
from zeroshard.run.address import check_address, interface_socket, listening_socket
from zeroshard.run.exit_report import tell_launcher
from zeroshard.run.recordings import PRESENCE, recording_dir
from zeroshard.watchdog.diagnosis import Diagnosis, diagnose
from zeroshard.watchdog.messages import StoreLost, watchdog_namespace
from zeroshard.watchdog.rank_status import RankStatus, Wait
from zeroshard.watchdog.run_record import StorePlace
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stacks import stack_line
from zeroshard.watchdog.watchdog import Watchdog, hold


def join_ranks(*, distributed_port: int = 29500, dist_init_required: bool | None = None) -> None:
    """Join the ranks of the run, unless this process has done so, or is alone.

    One process needs no process group, no port and no other backend. Raises as
    :func:`init_distributed`.
    """
    if not dist.is_initialized() and rank_info_of().world_size > 1:
        init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> RankInfo:
    """Initialise ``torch.distributed``, unless it is initialised already.

    The signature is DeepSpeed's ``init_distributed``. The default of ``dist_backend`` is NCCL with CUDA
    and gloo without. Without a launcher this process becomes the only rank and opens no port. The keys
    in the store are private to this attempt at the run, so that a restarted rank cannot read the
    addresses of dead ranks. ``config`` is ignored.

    Raises:
        LaunchError: ``dist_init_required=False`` without a group, a broken environment, or MPI over
            several hosts without the address of rank 0.
        RankLate: some ranks did not join within ``timeout``; it names them.
    """
    del config  # part of DeepSpeed's signature; nothing in it concerns the process group
    if dist.is_initialized():
        return current_rank_info()
    if dist_init_required is False:
        raise LaunchError(
            "dist_init_required is False, but torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group first, or leave the argument out."
        )
    rank_info = rank_info_of(mpi=auto_mpi_discovery)
    space = f"zs/{run_name().run}/{run_name().attempt}"
    if rank >= 0 and world_size > 0:
        rank_info = RankInfo(
            rank, world_size, rank_info.local_rank, rank_info.local_world_size, "arguments"
        )
    if init_method is None:
        check_master(rank_info)
    if init_method is None and rank_info.launcher == "none":
        store: Store = HashStore()
    else:
        store = _met_store(init_method, distributed_port, rank_info, space, timeout)
    backend = dist_backend or default_backend()
    dist.init_process_group(
        backend,
        store=store,
        rank=rank_info.rank,
        world_size=rank_info.world_size,
        timeout=timeout,
    )
    watch_from_now_on(space)
    if verbose and rank_info.is_main_rank:
        print(
            f"zeroshard: {rank_info.world_size} ranks over {backend} ({rank_info.launcher})",
            flush=True,
        )
    return rank_info


def _met_store(
    init_method: str | None, port: int, rank_info: RankInfo, space: str, timeout: timedelta
) -> Store:
    """The store of a run, after all ranks have come to it. ``space``: of the keys of this attempt.

    Raises:
        RankLate: some ranks did not come within ``timeout``.
    """
    method = init_method or ("env://" if _has_master() else f"tcp://{_master(port)}")
    store = _store(method, rank_info, timeout)
    if init_method is None:
        store = PrefixStore(space, store)
    await_all(
        cast("AgreeStore", PrefixStore("joining", store)),
        rank_info.rank,
        rank_info.world_size,
        timeout_s=timeout.total_seconds(),
    )
    return store


def _store(method: str, rank_info: RankInfo, timeout: timedelta) -> Store:
    """The store that the ranks meet through. Waits for the rank that serves it, and for no other."""
    url = urlparse(method)
    if url.scheme not in ("env", "tcp"):
        store, _, _ = next(
            rendezvous(method, rank_info.rank, rank_info.world_size, timeout=timeout)
        )
        return cast("Store", store)
    if url.scheme == "env":
        url = urlparse(f"tcp://{_master(0)}")
    host, port = url.hostname or "127.0.0.1", url.port or 0
    check_address(host, port)
    serves = rank_info.rank == 0 and not launcher_serves_store()
    if not serves:
        await_server(
            host, port, rank_info.rank, rank_info.world_size,
            timeout_s=timeout.total_seconds(), server="" if launcher_serves_store() else "rank 0",
        )  # fmt: skip
    opened = None
    if serves:
        is_one_host = rank_info.local_world_size == rank_info.world_size
        opened = (listening_socket if is_one_host else interface_socket)(host, port)
    return TCPStore(
        host, port, rank_info.world_size, serves, timeout, wait_for_workers=False, multi_tenant=True,
        master_listen_fd=None if opened is None else opened.detach(),
    )  # fmt: skip


def _master(port: int) -> str:
    """``address:port`` of the store, from the launcher's environment; ``port`` if it gives none."""
    address, port = meeting_place(port)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _has_master() -> bool:
    return "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ


#: The watchdogs of this process, by the global ranks that they watch. Process-wide, as they watch
#: the main thread. A watchdog lives as long as a session that it follows, or as long as it is held.
_RUNNING: weakref.WeakValueDictionary[tuple[int, ...], Watchdog] = weakref.WeakValueDictionary()


def watchdog_of(ranks: tuple[int, ...], settings: WatchdogSettings, space: str) -> Watchdog:
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
        cast("AgreeStore", PrefixStore(watchdog_namespace(ranks, space), client)),
        rank=rank,
        ranks=ranks,
        recording=recording_dir(f"{run}-{secrets.token_hex(4)}") / PRESENCE,
        settings=settings,
        store_rank=store_rank(store),
        over=lambda: group() is None or not dist.is_initialized(),
        hung_up=functools.partial(hung_up, sockets, port),
    )
    return watchdog


def watch_from_now_on(space: str) -> None:
    """Keep a watchdog over all ranks as long as their process group lives, with or without sessions."""
    settings = WatchdogSettings().with_environment()
    if settings.watchdog and dist.get_world_size() > 1 and dist.get_backend() != "fake":
        hold(watchdog_of(tuple(range(dist.get_world_size())), settings, space))


def own_client(store: Any) -> Any:
    """A second connection to ``store``, because a client that two threads share deadlocks."""
    return store.clone() if hasattr(store, "clone") else store


def place_of(store: Any, space: str) -> StorePlace:
    """Where another process finds ``store``. ``space``: the prefix of the watchdogs' keys in it."""
    bottom = _bottom(store)
    if isinstance(bottom, TCPStore):
        return StorePlace("tcp", host=bottom.host, port=bottom.port, space=space)
    if isinstance(bottom, FileStore):
        path = os.path.abspath(cast("Any", bottom).path)
        return StorePlace("file", path=path, space=space)
    return StorePlace(type(bottom).__name__, space=space)


def _bottom(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def store_rank(store: Any) -> int | None:
    """The rank that serves the store; None if the launcher serves it or if it is a file."""
    return 0 if isinstance(_bottom(store), TCPStore) and not launcher_serves_store() else None


def await_all(store: AgreeStore, rank: int, world_size: int, *, timeout_s: float) -> None:
    """Return when all ranks have called ``init_distributed``. Before that there is no watchdog.

    Raises:
        RankLate: some ranks did not call it in time; it names them.
    """
    waiting = Waiting(rank, range(world_size), timeout_s)
    try:
        meeting = Rendezvous(store, rank, world_size, timeout_s + 60, waiting.look)
        if meeting.arrive("", lambda _: "", "joined") is None:
            meeting.outcome("joined")
    except RankLate as error:  # later ranks must fail too: these ranks have gone
        store.set("gave up", json.dumps([str(error), error.ranks, error.did]))
        raise
    if store.check(["gave up"]):
        text, ranks, did = json.loads(store.get("gave up"))
        late = RankLate(text)
        late.ranks, late.did = tuple(ranks), did
        tell_launcher(late, os.environ)
        raise late


def await_server(
    host: str, port: int, rank: int, world_size: int, *, timeout_s: float, server: str
) -> None:
    """Return when the store at ``host:port`` can be reached.

    ``server``: "rank 0" if that rank serves the store, "" if the launcher does.

    Raises:
        RankLate: the store cannot be reached within ``timeout_s``.
    """
    waiting = Waiting(rank, range(world_size), timeout_s, reporter=1)
    while True:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError as error:
            why = error.strerror or str(error)
        waiting.look([0] if server else [], f"the store at {host}:{port} ({why})")
        time.sleep(0.05)


@contextlib.contextmanager
def waiting_for_partners(
    ranks: Sequence[int], call: str, *, timeout_s: float
) -> Iterator[Callable[[Sequence[int]], None]]:
    """A context in which this rank waits in ``call`` for global ``ranks``, through the store.

    Yields a check that such waits make a few times a second; it gets positions in ``ranks``. It raises
    :class:`RankLost` if one of them has ended, and the watchdog's diagnosis if one of them is frozen or
    late by ``timeout_s``. The watchdog is that of init_distributed. Without it, long waits are reported
    and end after ``timeout_s``.
    """
    everyone = tuple(range(dist.get_world_size()))
    waiting = Waiting(dist.get_rank(), ranks, timeout_s, call=call, timeout_key="")
    watchdog = _RUNNING.get(everyone)
    if watchdog is None or not watchdog.usable:
        yield lambda missing: waiting.look([ranks[at] for at in missing], call)
        return

    def check(missing: Sequence[int]) -> None:
        with contextlib.suppress(StoreLost):  # the wait itself asks the store and reports it
            for at in missing:
                if why := watchdog.why_gone(call, ranks[at]):
                    raise RankLost(
                        f"RankLost: rank {ranks[at]} will not make this call of {call}, for which "
                        f"rank {dist.get_rank()} waits: {why}. Look at its output first."
                    )

    with watchdog.set_up_with(tuple(ranks), call, waiting.settings):
        yield check


class Waiting:
    """One wait for ranks that have not made ``call``. Reports if it takes long; raises at ``timeout_s``.

    ``rank``: this one, of ``ranks``. ``reporter``: the rank that reports; None: the first that waits.
    ``timeout_key``: where a user sets ``timeout_s``; "" if that is not possible.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        reporter: int | None = None,
        *,
        call: str = "init_distributed",
        timeout_key: str = "init_distributed(timeout=...)",
    ) -> None:
        self._rank = rank
        self._reporter = reporter
        self._ranks = ranks
        self._call = call
        self.settings = WatchdogSettings(
            collective_timeout_s=timeout_s,
            stuck_s=timeout_s,
            timeout_key=timeout_key,
        ).with_environment()
        self._main = threading.get_ident()
        self._begun_s = time.monotonic()
        self._due_s = self.settings.report_s()
        # An agent starts all ranks of a host together, but it may not have started the last one yet.
        self._look_s = 3.0
        self._fates: dict[int, tuple[str, str]] = {}
        info = current_rank_info()
        first = info.rank - info.local_rank
        together = info.local_world_size if an_agent_started_this() else 0
        self._here = range(first, first + together)

    def look(self, missing: Sequence[int], what: str = "init_distributed") -> None:
        """Report, or raise the diagnosis, if it is time. One rank reports for all that wait.

        It is time at once if a missing rank of this host has ended or is stopped.
        """
        waited_s = time.monotonic() - self._begun_s
        news = waited_s > self._look_s and self._note_fates(missing)
        if not news and waited_s < min(self._due_s, self.settings.collective_timeout_s):
            return
        if not news:
            self._due_s = max(2 * self._due_s, waited_s + 60.0)
        late = frozenset(missing)
        diagnosis = self._diagnosis(late, waited_s, what)
        if diagnosis.fatal:
            error = diagnosis.error()
            tell_launcher(error, os.environ)
            raise error
        reporter = self._reporter
        if self._rank == (min(set(self._ranks) - late) if reporter is None else reporter):
            print(diagnosis.text, file=sys.stderr, flush=True)

    def _note_fates(self, missing: Sequence[int]) -> bool:
        """Look for missing ranks that the launcher of this rank started. Whether one has a new fate."""
        self._look_s = time.monotonic() - self._begun_s + 1.0
        siblings = sibling_ranks()
        if self._rank not in siblings:  # no launcher, or one that starts ranks in another way
            return False
        before = dict(self._fates)
        for rank in missing:
            if rank not in self._here:
                continue
            if rank not in siblings:
                ended = f"its process has ended, before it reached {self._call}"
                self._fates[rank] = ("gone", ended)
            elif is_stopped(siblings[rank]):
                stopped = f"process {siblings[rank]} is stopped by a signal"
                self._fates[rank] = ("stopped", f"{stopped}, and has not reached {self._call}")
            else:
                self._fates.pop(rank, None)
        return any(before.get(rank) != fate for rank, fate in self._fates.items())

    def _diagnosis(self, missing: frozenset[int], waited_s: float, what: str) -> Diagnosis:
        here = Wait("joining", 1, what)
        line = stack_line(self._main)
        absent = "absent", f"has not reached {self._call}. Look at its output"
        fates = {rank: self._fates.get(rank, absent) for rank in missing}
        seen = [
            RankStatus(rank, None, fate=fates[rank][0], detail=fates[rank][1], answered=False)
            if rank in missing
            else RankStatus(rank, None, wait=here, stack=line, answered=rank == self._rank)
            for rank in self._ranks
        ]
        return diagnose(seen, self.settings, blocked_s=waited_s, label=here.label)
