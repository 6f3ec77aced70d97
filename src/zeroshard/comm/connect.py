"""Chooses the transport of a group of ranks and opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from zeroshard.comm.agreement import Store as AgreeStore
from zeroshard.comm.agreement import namespace
from zeroshard.comm.collectives import Comm, ErrorExplainer, ProcessGroupComm, SoloComm
from zeroshard.comm.gloo import GlooComm
from zeroshard.comm.host import open_sockets
from zeroshard.comm.p2p import P2PComm, open_links
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.shm import PeerMemory, ShmComm, open_peer_memory
from zeroshard.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Opening:
    """What a transport gets to open a communicator: the same on every rank, but for the last four."""

    group: dist.ProcessGroup
    backend: str
    ranks: list[int]
    purpose: str
    device_type: str
    timeout_s: float
    recorder: Recorder | None
    guard: ErrorExplainer | None
    check: Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Transport:
    """One way to move bytes between ranks. ``backend``: the one whose process group it needs, or any.

    ``open``: returns the communicator, or why these ranks cannot use it: on all of them the same.
    """

    open: Callable[[Opening], Comm | str]
    backend: str | None = None


def make_comm(
    *,
    transport: str = "auto",
    recorder: Recorder | None = None,
    group: dist.ProcessGroup | None = None,
    purpose: str = "data",
    device_type: str = "cpu",
    guard: ErrorExplainer | None = None,
    timeout_s: float = 1860.0,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> Comm:
    """A communicator over ``group`` (default: all ranks). Every rank of the group must call it.
    ``check`` may end the wait for the other ranks by raising.

    ``transport``: a row of :data:`TRANSPORTS`, or ``auto``: the first row that these ranks can use. Gloo
    and NCCL get a process group of their own, so that tags, sockets and streams are not shared with the
    program or with another purpose.

    Raises:
        ConfigError: these ranks cannot use ``transport``. All ranks raise it, with the reason.
    """
    if transport not in ("auto", *TRANSPORTS):
        known = ", ".join(("auto", *TRANSPORTS))
        raise ConfigError(f"transport {transport!r} is unknown. Use one of {known}.")
    if not (dist.is_available() and dist.is_initialized()):
        return SoloComm(recorder)
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # initialised
    backend = _backend_for(group, device_type)
    if backend == "fake":
        return ProcessGroupComm(group, recorder=recorder, guard=guard)
    if dist.get_world_size(group) == 1 and transport != "stock":
        return SoloComm(recorder)
    ranks = dist.get_process_group_ranks(group)
    opening = Opening(
        group, backend, ranks, purpose, device_type, timeout_s, recorder, guard, check
    )
    for name, row in (
        TRANSPORTS.items() if transport == "auto" else [(transport, TRANSPORTS[transport])]
    ):
        if row.backend in (None, backend):
            comm = row.open(opening)
        else:
            comm = f"it needs {row.backend}, but this process group uses {backend}"
        if not isinstance(comm, str):
            return comm
        if transport != "auto":
            raise ConfigError(f'transport "{name}" is not possible here: {comm}. Use "auto".')
    raise AssertionError("the last row serves all ranks")


def _open_shm(opening: Opening) -> Comm | str:
    met = _meet(opening)
    if isinstance(met, str):
        return met
    return ShmComm(
        met,
        rank=dist.get_rank(opening.group),
        ranks=opening.ranks,
        recorder=opening.recorder,
        guard=opening.guard,
        timeout_s=opening.timeout_s,
    )


def _open_p2p(opening: Opening) -> Comm:
    before = open_sockets()
    links = open_links(
        default_store(),
        opening.ranks,
        dist.get_rank(),
        label=opening.purpose,
        timeout_s=opening.timeout_s,
    )
    return P2PComm(
        links,
        ranks=opening.ranks,
        recorder=opening.recorder,
        guard=opening.guard,
        sockets=_new_sockets(before),
    )


def _open_stock(opening: Opening) -> Comm:
    backend, recorder, guard = opening.backend, opening.recorder, opening.guard
    stock = GlooComm if backend == "gloo" else ProcessGroupComm
    if len(opening.ranks) < dist.get_world_size():
        # Only these ranks are here, and a group that only they build could meet the store keys of
        # an earlier one of the same ranks.
        return stock(opening.group, recorder=recorder, guard=guard)
    timeout = timedelta(seconds=opening.timeout_s)
    before = open_sockets()
    own = dist.new_group(
        timeout=timeout, backend=backend, group_desc=f"zeroshard {opening.purpose}"
    )
    sockets = _new_sockets(before) if backend == "gloo" else None
    return stock(own, recorder=recorder, guard=guard, owns_group=True, sockets=sockets)


TRANSPORTS: dict[str, Transport] = {
    "shm": Transport(_open_shm, "gloo"),  # memory that CPU ranks of one host share
    "p2p": Transport(_open_p2p, "gloo"),  # gloo's sends and receives, with tags
    "stock": Transport(_open_stock),  # the collectives of the process group's own backend
}
"""``auto`` takes the first that works; the last works everywhere."""


def _meet(opening: Opening) -> PeerMemory | str:
    """Share memory among the ranks, or why not; the same on all of them."""
    if opening.device_type != "cpu":
        return f"it moves tensors of the CPU, not of {opening.device_type}"
    ranks = opening.ranks
    label = f"zs/shm/{opening.purpose}/{','.join(map(str, ranks))}"
    me = ranks.index(dist.get_rank())
    place = namespace(cast("AgreeStore", default_store()), label, me)
    return open_peer_memory(place, me, len(ranks), timeout_s=opening.timeout_s, check=opening.check)


def _new_sockets(before: Mapping[int, str]) -> dict[int, str]:
    """The sockets that were opened since ``before``: those of the connections just made."""
    return {fd: what for fd, what in open_sockets().items() if before.get(fd) != what}


def default_store() -> Store:
    """The store that the ranks met through. Torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


def _backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves ``device_type``; groups may have one per device."""
    backend = dist.get_backend(group)
    if backend == "fake":
        return backend
    by_device = dict(
        part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part
    )
    return by_device.get(device_type, backend)
