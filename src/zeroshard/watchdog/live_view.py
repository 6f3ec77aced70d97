"""Asks the ranks of a running job what they do, from another process: ``zeroshard stacks``.

The other process is one more client of the run's store. It rings the bell of the ranks' watchdogs, which
answer from their own threads. No rank waits for the answers, and the keys are removed at the end.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    TCPStore,
)

from zeroshard.comm.host import Process, this_process
from zeroshard.comm.store_keys import Store, look
from zeroshard.errors import CLOSED, UsageError
from zeroshard.watchdog.messages import BELL, StoreClient, StoreLost
from zeroshard.watchdog.rank_status import RankStatus, status_from_answer, status_from_host
from zeroshard.watchdog.run_record import (
    RANKS,
    Peer,
    RanksFile,
    StorePlace,
    newest_flight,
    read_left,
    read_ranks,
)

T = TypeVar("T")

_POLL_S = 0.05
_RESERVE_S = 1.0
"""What is left of the limit for ranks that have not answered, and for removing the keys."""
_CONNECT_S = 3.0


@dataclass(frozen=True)
class RankView:
    """One rank. ``stack``: of its main thread; ``stacks``: of all threads, if asked; "": not known."""

    status: RankStatus
    pid: int
    stack: str = ""
    stacks: str = ""


@dataclass(frozen=True)
class RunView:
    """All ranks of a run. ``lost``: why the store did not answer; "": it did."""

    views: list[RankView]
    took_s: float
    with_stacks: bool
    lost: str = ""


def view_run(folder: Path, *, threads: bool = False, limit_s: float = 10.0) -> RunView:
    """What every rank of the run of ``folder`` does now. Takes at most about ``limit_s`` seconds.

    ``threads``: with the stacks of all threads.

    Raises:
        UsageError: the run has ended, or cannot be reached from here; the text says why.
    """
    begun_s = time.monotonic()
    file = _ranks_of(folder)
    here = this_process()
    if alive_here(file, here) is False:
        raise UsageError(_ended(folder))
    until_s = begun_s + max(limit_s - _RESERVE_S, limit_s / 2)
    lost = ""
    answers: dict[int, dict[str, Any]] = {}
    states: dict[int, str] = {}
    try:
        with _connected(file, until_s) as call:
            _ask(call, file, here, threads, until_s, answers)
            states = call(lambda store: _states(store, file, answers), _RESERVE_S)
    except StoreLost as error:
        elsewhere = _other_host(file, here)
        lost = f"{error}{elsewhere}"
        if not answers and alive_here(file, here) is not True:
            if elsewhere:
                raise UsageError(f"the run of {folder} cannot be asked here: {lost}") from None
            raise UsageError(f"{_ended(folder)} ({lost})") from None
    views = [
        _view_of(peer, answers[rank])
        if rank in answers
        else _silent(peer, here, states.get(rank, ""))
        for rank, peer in sorted(file.peers.items())
    ]
    return RunView(views, time.monotonic() - begun_s, file.stacks, lost)


def alive_here(file: RanksFile, here: Process) -> bool | None:
    """Whether a rank of the run has a process on this host; None: all ranks are on other hosts."""
    local = [peer for peer in file.peers.values() if peer.is_on(here)]
    if not local:
        return None
    return any(peer.fate(here)[0] != "gone" for peer in local)


def _ranks_of(folder: Path) -> RanksFile:
    try:
        return read_ranks(folder)
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {RANKS}. Rank 0 writes it on its host when the first engine, or model "
            "under zero.Init, opens its connections: with several ranks, if trust.watchdog is true."
        ) from None


def _other_host(file: RanksFile, here: Process) -> str:
    """Where the store can be reached, if that is another host alone; else ""."""
    first = file.peers[min(file.peers)]
    if file.store.kind != "tcp" or first.is_on(here) or not _is_loopback(file.store.host):
        return ""
    host = first.process.host
    return f"; only host {host}, where rank {first.rank} ran, reaches it: run the command there"


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _ended(folder: Path) -> str:
    return f"the run of {folder} has ended: none of its ranks runs. Try: zeroshard explain {folder}"


@contextlib.contextmanager
def _connected(file: RanksFile, until_s: float) -> Iterator[Callable[..., Any]]:
    """Gives ``call(operation, timeout_s)``, as :meth:`StoreClient.call`."""
    client = StoreClient(cast("Store", None), name="zeroshard-view-store-client")
    try:
        opened = client.call(lambda _: _open(file.store), _CONNECT_S + 1)

        def call(operation: Callable[[Store], T], timeout_s: float | None = None) -> T:
            left_s = until_s - time.monotonic() if timeout_s is None else timeout_s
            return client.call(lambda _: operation(opened), max(left_s, 0.1))

        yield call
    finally:
        client.end()


def _open(place: StorePlace) -> Store:
    """A client of the run's store, with the key space of its watchdogs."""
    bottom: Any
    limit = timedelta(seconds=_CONNECT_S)
    where = f"the store at {place.host}:{place.port}"
    if place.kind == "tcp":
        # Torch itself would try again and again, and log each time.
        try:
            socket.create_connection((place.host, place.port), timeout=_CONNECT_S / 2).close()
        except OSError as error:
            raise StoreLost(f"{where}: {error.strerror or error}") from None
        bottom = TCPStore(place.host, place.port, None, False, limit, wait_for_workers=False)
    elif place.kind == "file":
        where = f"the store {place.path}"
        if not Path(place.path).is_file():
            raise StoreLost(f"{where} is not there")
        bottom = FileStore(place.path, -1)  # -1: it does not remove the file at the end
    else:
        raise UsageError(
            f"the ranks of this run met through a {place.kind}, which other processes cannot reach. Let "
            "zeroshard.init_distributed, or init_process_group with tcp:// or env://, connect them."
        )
    # What the ranks' own prefixes are depends on who opened the process group.
    card = f"{place.space}/card/"
    found = next((key for key in bottom.list_keys() if card in key), None)
    if found is None:
        raise StoreLost(f"{where} is not that of this run")
    prefix = found[: found.index(card) + len(place.space)]
    return cast("Store", PrefixStore(prefix, bottom))


def _ask(
    call: Callable[..., Any],
    file: RanksFile,
    here: Process,
    threads: bool,
    until_s: float,
    answers: dict[int, dict[str, Any]],
) -> None:
    """Ask all ranks; put what they answer into ``answers``."""

    def ask(store: Store) -> int:
        number = store.add("views", 1)
        store.set(f"view/{number}", json.dumps({"threads": threads}))
        store.add(BELL, 1)  # or no rank looks
        return number

    number = call(ask)

    def collect(store: Store) -> None:
        for rank in file.peers:
            if rank not in answers and (text := look(store, f"view/{number}/{rank}")) is not None:
                answers[rank] = json.loads(text)

    def remove(store: Store) -> None:
        store.delete_key(f"view/{number}")
        for rank in file.peers:
            store.delete_key(f"view/{number}/{rank}")

    try:
        while time.monotonic() < until_s:
            call(collect)
            missing = [peer for rank, peer in file.peers.items() if rank not in answers]
            if all(peer.fate(here)[0] in ("gone", "stopped") for peer in missing):
                return
            time.sleep(_POLL_S)
    finally:
        with contextlib.suppress(StoreLost):
            call(remove, _RESERVE_S)


def _states(store: Store, file: RanksFile, answers: dict[int, dict[str, Any]]) -> dict[int, str]:
    """What the cards of ranks that did not answer say: that they have left, and why."""
    found = {}
    for rank in file.peers:
        if rank not in answers and (text := look(store, f"card/{rank}")) is not None:
            card = json.loads(text)
            if card["state"] != "on":
                found[rank] = card["reason"] or CLOSED
    return found


def _view_of(peer: Peer, answer: dict[str, Any]) -> RankView:
    own = replace(peer, process=Process(**answer["process"]))
    return RankView(
        status_from_answer(own, {**answer, "stacks": ""}),
        own.process.pid,
        answer["main"],
        answer["stacks"],
    )


def _silent(peer: Peer, here: Process, left: str) -> RankView:
    """A rank that did not answer, with what this host knows of it."""
    status = status_from_host(peer, here)
    kept = read_left(peer, []) if peer.is_on(here) else None
    status = replace(status, flight=newest_flight(kept.flights) if kept is not None else None)
    if left and status.fate != "stopped":
        status = replace(status, fate="left", detail=f"left: {left}")
    return RankView(status, peer.process.pid, peer.ask_for_stack(here))
