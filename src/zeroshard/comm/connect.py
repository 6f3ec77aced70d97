"""Chooses the transport of a group of ranks and opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

TRANSPORTS = ("auto", "shm", "p2p", "stock")


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

    ``transport``, for CPU ranks of a gloo group: ``shm`` is memory that ranks of one host share;
    ``p2p`` is gloo with tags. ``stock`` is the group's own collectives. ``auto`` takes shm where all
    ranks can, else p2p, and stock on other backends. On gloo and NCCL a new process group is opened for
    each ``purpose``, so that its tags, sockets and streams are not shared with the program or another
    purpose.

    Raises:
        ConfigError: these ranks cannot use ``transport``. All ranks raise it, with the reason.
    """
    if transport not in TRANSPORTS:
        raise ConfigError(
            f"transport {transport!r} is unknown. Use one of {', '.join(TRANSPORTS)}."
        )
    if not (dist.is_available() and dist.is_initialized()):
        return SoloComm(recorder)
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # initialised
    backend = _backend_for(group, device_type)
    if backend == "fake":
        return ProcessGroupComm(group, recorder=recorder, guard=guard)
    if dist.get_world_size(group) == 1 and transport != "stock":
        return SoloComm(recorder)
    if transport in ("shm", "p2p") and backend != "gloo":
        raise ConfigError(
            f'transport "{transport}" needs gloo, but this process group uses {backend}. '
            'Use "auto".'
        )
    ranks = dist.get_process_group_ranks(group)
    if backend == "gloo" and transport in ("auto", "shm"):
        met = _meet(ranks, purpose, device_type, timeout_s, check)
        if not isinstance(met, str):
            return ShmComm(
                met,
                rank=dist.get_rank(group),
                ranks=ranks,
                recorder=recorder,
                guard=guard,
                timeout_s=timeout_s,
            )
        if transport == "shm":
            raise ConfigError(
                f'transport "shm" is not possible here: {met}. Use "auto": it takes p2p then.'
            )
    if backend == "gloo" and transport != "stock":
        before = open_sockets()
        links = open_links(
            default_store(), ranks, dist.get_rank(), label=purpose, timeout_s=timeout_s
        )
        return P2PComm(
            links, ranks=ranks, recorder=recorder, guard=guard, sockets=_new_sockets(before)
        )
    stock = GlooComm if backend == "gloo" else ProcessGroupComm
    if len(ranks) < dist.get_world_size():
        # Only these ranks call this. A group that only they build could read the store keys of an
        # earlier group of the same ranks.
        return stock(group, recorder=recorder, guard=guard)
    timeout = timedelta(seconds=timeout_s)
    before = open_sockets()
    own = dist.new_group(timeout=timeout, backend=backend, group_desc=f"zeroshard {purpose}")
    sockets = _new_sockets(before) if backend == "gloo" else None
    return stock(own, recorder=recorder, guard=guard, owns_group=True, sockets=sockets)


def _meet(
    ranks: list[int],
    purpose: str,
    device_type: str,
    timeout_s: float,
    check: Callable[[Sequence[int]], None],
) -> PeerMemory | str:
    """Share memory among ``ranks``, or return why that is impossible; the same on all of them."""
    if device_type != "cpu":
        return f"it moves tensors of the CPU, not of {device_type}"
    label = f"zs/shm/{purpose}/{','.join(map(str, ranks))}"
    me = ranks.index(dist.get_rank())
    place = namespace(cast("AgreeStore", default_store()), label, me)
    return open_peer_memory(place, me, len(ranks), timeout_s=timeout_s, check=check)


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
