"""Opens the memory of the other ranks of a host, or says why that is impossible."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from zeroshard.comm.host import Process, this_process
from zeroshard.comm.shared_memory import Arena, PeerMapping, unavailable
from zeroshard.comm.store_keys import Store, exchange


class PeerMemory(NamedTuple):
    """This rank's arena, the mappings of the others, and all processes, by rank inside the group."""

    arena: Arena
    mappings: Mapping[int, PeerMapping]
    processes: Sequence[Process]


def open_peer_memory(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> PeerMemory | str:
    """Open each other's memory, or return why that is impossible: the same on all ranks. Collective.

    ``store`` is a key space that only this call uses; ``check`` may end its waits by raising.
    """
    wait = functools.partial(exchange, store, rank, size, timeout_s=timeout_s, check=check)
    arena, why = _own_arena(rank)
    mine = {"why": why, "process": asdict(this_process()), "fd": -1, "token": 0}
    if arena is not None:
        mine |= {"fd": arena.fd, "token": arena.control.token}
    cards = [json.loads(text) for text in wait(json.dumps(mine), key="card")]
    processes = [Process(**card["process"]) for card in cards]
    why = next((card["why"] for card in cards if card["why"]), "") or apart(processes)
    mappings: Mapping[int, PeerMapping] = {}
    if not why:
        mappings, why = _mappings(rank, processes, cards)
    # No rank goes on before all have opened all. After that a process may end at any time.
    answers = wait(why, key="opened")
    why = next((answer for answer in answers if answer), "")
    if arena is None:
        return why
    if why:
        arena.close()
        return why
    return PeerMemory(arena, mappings, processes)


def _own_arena(rank: int) -> tuple[Arena | None, str]:
    """The memory that this rank shares; without it the reason."""
    if why := unavailable():
        return None, why
    try:
        return Arena(), ""
    except OSError as error:
        return None, f"rank {rank} cannot create shared memory: {error}"


def _mappings(
    rank: int, processes: Sequence[Process], cards: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, PeerMapping], str]:
    """The memory of the other ranks, as far as it can be opened, and why the next one cannot."""
    mappings: dict[int, PeerMapping] = {}
    for peer, card in enumerate(cards):
        if peer == rank:
            continue
        try:
            mappings[peer] = PeerMapping(processes[peer].pid, card["fd"], card["token"])
        except OSError as error:
            return mappings, (
                f"rank {rank} cannot open the memory of rank {peer}: {error.strerror or error}"
            )
    return mappings, ""


def apart(processes: Sequence[Process]) -> str:
    """Why the processes of these ranks cannot share memory; "" if they can."""
    first = processes[0]
    for rank, process in enumerate(processes):
        if not process.space or process.space != first.space:
            there = "in another container" if process.host == first.host else f"on {process.host}"
            return f"rank 0 runs on {first.host}, rank {rank} {there}"
    return ""
