"""Chooses the transport of a group of ranks and opens it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist

from zeroshard.comm.agreement import ControlGroup, run_on_all_ranks
from zeroshard.comm.collectives import Comm, ErrorExplainer, SoloComm
from zeroshard.comm.host import Process, host_number, new_sockets, open_sockets
from zeroshard.comm.p2p import P2PComm, open_links
from zeroshard.comm.planned import PLANNED, processes_of
from zeroshard.comm.process_group import GlooComm, ProcessGroupComm
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.shared_memory import PeerMemory, apart, open_peer_memory
from zeroshard.comm.shm import ShmComm, ShmLink
from zeroshard.comm.store_keys import Rendezvous, Store, namespace, ranks_key
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import ops_of
from zeroshard.errors import ConfigError, LaunchError, UsageError

_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Opening:
    """What a transport gets to open a communicator. The last three are this rank's own objects."""

    group: dist.ProcessGroup
    backend: str
    ranks: list[int]
    purpose: str
    device: torch.device
    timeout_s: float
    recorder: Recorder | None
    guard: ErrorExplainer | None
    check: Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class Transport:
    """One way to move bytes between ranks. ``backend``: of the process group that it needs; None: any.

    ``open`` returns the communicator, or why these ranks cannot use it. The answer is the same on all of
    them. ``refuses``: why it cannot serve ranks with these processes, "" if it can; ``open`` asks it too.
    """

    open: Callable[[Opening], Comm | str]
    backend: str | None = None
    refuses: Callable[[Sequence[Process]], str] = lambda _processes: ""


def make_comm(
    *,
    transport: str = "auto",
    recorder: Recorder | None = None,
    group: dist.ProcessGroup | None = None,
    purpose: str = "data",
    device: torch.device = _CPU,
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
    backend = _backend_for(group, device.type)
    ranks = dist.get_process_group_ranks(group)
    if backend == "fake":
        several = len(ranks) > 1 and device.type == "cpu"
        planned = PLANNED[_planned_transport(transport, ranks) if several else "auto"]
        return planned(group, recorder=recorder, guard=guard, device=device)
    if len(ranks) == 1 and transport != "stock":
        return SoloComm(recorder)
    opening = Opening(group, backend, ranks, purpose, device, timeout_s, recorder, guard, check)
    rows = TRANSPORTS.values() if transport == "auto" else [TRANSPORTS[transport]]
    for row in rows:
        if row.backend in (None, backend):
            found = row.open(opening)
        else:
            found = f"it needs {row.backend}, but this process group uses {backend}"
        if not isinstance(found, str):
            return found
    # Not of "auto": the last row works for all ranks.
    raise ConfigError(f'transport "{transport}" is not possible here: {found}. Use "auto".')


def _planned_transport(transport: str, ranks: Sequence[int]) -> str:
    """The row that ``transport`` would be for these CPU ranks of a simulated run; "auto": not known."""
    processes = processes_of(ranks)
    if transport != "auto" or processes is None:
        return transport
    return next(name for name, row in TRANSPORTS.items() if not row.refuses(processes))


def _open_shm(opening: Opening) -> Comm | str:
    met = _meet(opening)
    if isinstance(met, str):
        return met
    return ShmComm(met, ranks=opening.ranks, recorder=opening.recorder, guard=opening.guard)


def open_link(
    ranks: tuple[int, int],
    *,
    transport: str,
    group: dist.ProcessGroup,
    device: torch.device,
    recorder: Recorder,
    guard: ErrorExplainer | None,
    timeout_s: float,
    check: Callable[[Sequence[int]], None],
) -> ShmLink | None:
    """Messages from the first of two ranks to the second one through shared memory. Both call it.

    None on both: the transport is another one, or they cannot share memory.
    """
    backend = _backend_for(group, device.type)
    if transport not in ("auto", "shm") or backend != "gloo":
        return None
    opening = Opening(
        group, backend, list(ranks), "messages", device, timeout_s, recorder, guard, check
    )
    met = _meet(opening)
    if isinstance(met, str):
        return None
    return ShmLink(met, ranks, recorder, guard)


def _host_only(opening: Opening) -> str:
    """Why a transport through host memory cannot serve the device; "" if it can."""
    kind = opening.device.type
    return "" if kind == "cpu" else f"it moves tensors of the CPU, not of {kind}"


def _open_p2p(opening: Opening) -> Comm | str:
    if refusal := _host_only(opening):
        return refusal
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
        sockets=new_sockets(before),
    )


def _open_stock(opening: Opening) -> Comm:
    backend, recorder, guard = opening.backend, opening.recorder, opening.guard
    stock = GlooComm if backend == "gloo" else ProcessGroupComm
    if len(opening.ranks) < dist.get_world_size():
        # Only these ranks are here, and a group that only they build could meet the store keys of
        # an earlier one of the same ranks.
        return stock(opening.group, recorder=recorder, guard=guard, device=opening.device)
    timeout = timedelta(seconds=opening.timeout_s)
    before = open_sockets()
    connected = connected_device(opening.group, opening.device)
    ops = ops_of(connected or _CPU)
    free_nbytes = ops.free_nbytes()
    own = dist.new_group(
        timeout=timeout,
        backend=backend,
        group_desc=f"zeroshard {opening.purpose}",
        device_id=connected,
    )
    return stock(
        own,
        recorder=recorder,
        guard=guard,
        owns_group=True,
        sockets=new_sockets(before) if backend == "gloo" else None,
        device=opening.device,
        buffer_nbytes=max(0, free_nbytes - ops.free_nbytes()),
    )


def connected_device(group: dist.ProcessGroup, device: torch.device) -> torch.device | None:
    """The device for which a new group beside ``group`` connects at once, not in its first collective.

    Then an error of the backend is raised where the engine is built, and its memory can be measured.
    None: gloo connects in any case.

    Raises:
        UsageError: the program bound its process group to another device.
    """
    if device.type == "cpu" or _backend_for(group, device.type) in ("gloo", "fake"):
        return None
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    if bound not in (None, device):
        raise UsageError(
            f"The engine trains on {device}, but init_process_group was given device_id={bound}. Give "
            "both the same device, or leave device_id out."
        )
    return device


class DeviceUse(NamedTuple):
    """The device of one rank, as it tells the others. ``identity``: "" if ranks may share the device."""

    kind: str  # "cuda"
    name: str  # "cuda:0"
    identity: str
    host: str


def device_use(group: dist.ProcessGroup, device: torch.device) -> DeviceUse:
    """What this rank tells the others about its device. Only gloo lets ranks share a device.

    NCCL knows a host by ``NCCL_HOSTID`` if that is set.
    """
    shared = _backend_for(group, device.type) in ("gloo", "fake") or device.type == "cpu"
    identity = "" if shared else ops_of(device).identity()
    host = os.environ.get("NCCL_HOSTID") or str(host_number())
    return DeviceUse(device.type, str(device), identity, host)


def check_devices(uses: Mapping[int, DeviceUse]) -> None:
    """Check that no two ranks train on one device, if their backend needs one for each. By global rank.

    Raises:
        LaunchError: names the ranks and the device. The text is the same on all ranks.
    """
    users: dict[tuple[str, str], list[int]] = {}
    for rank, use in uses.items():
        if use.identity:
            users.setdefault((use.host, use.identity), []).append(rank)
    found = [
        f"{rank_ranges(ranks)} ({' and '.join(sorted({uses[r].name for r in ranks}))}, {identity})"
        for (_, identity), ranks in users.items()
        if len(ranks) > 1
    ]
    if found:
        raise LaunchError(
            f"Ranks train on the same device: {'; '.join(found)}. The collectives of devices need a "
            "device for each rank. Start at most one rank for each device of a host, and let each rank "
            "use its own: leave device out, or give it the index LOCAL_RANK. To let ranks share a "
            'device, use gloo: init_distributed(dist_backend="gloo").'
        )


TRANSPORTS: dict[str, Transport] = {
    "shm": Transport(_open_shm, "gloo", apart),  # memory that CPU ranks of one host share
    "p2p": Transport(_open_p2p, "gloo"),  # gloo's sends and receives, with tags
    "stock": Transport(_open_stock),  # the collectives of the process group's own backend
}
"""``auto`` takes the first that works; the last works everywhere."""


def _meet(opening: Opening) -> PeerMemory | str:
    """Share memory among the ranks, or why not; the same on all of them."""
    if refusal := _host_only(opening):
        return refusal
    ranks = opening.ranks
    label = f"zs/shm/{opening.purpose}/{ranks_key(ranks)}"
    me = ranks.index(dist.get_rank())
    place = namespace(default_store(), label, me)
    return open_peer_memory(Rendezvous(place, me, len(ranks), opening.timeout_s, opening.check))


def default_store() -> Store:
    """The store that the ranks met through. Torch has no public name for it."""
    return cast("Store", dist.distributed_c10d._get_default_store())


def said_by_rank_0(make: Callable[[], str], topic: str, failed: str) -> str:
    """The text that ``make()`` returns on rank 0 of the default process group, on every rank. Collective.

    It goes through the store, so no transport times out while rank 0 reads a disk. Without a process
    group: the text of this process. Errors are those of
    :func:`~zeroshard.comm.agreement.run_on_all_ranks`, the same on every rank.
    """
    if not dist.is_initialized():
        return make()
    me = dist.get_rank()
    place = namespace(default_store(), f"zs/said/{topic}", me)
    group = ControlGroup(place, rank=me, size=dist.get_world_size())
    _, said = run_on_all_ranks(
        group,
        failed,
        topic,
        lambda: "" if me else make(),
        say=lambda own: own,
        decide=lambda texts: texts[0],
    )
    return str(said)


def _backend_for(group: dist.ProcessGroup, device_type: str) -> str:
    """The backend that serves ``device_type``; groups may have one per device."""
    backend = dist.get_backend(group)
    if backend == "fake":
        return backend
    by_device = dict(
        part.split(":", 1) for part in dist.get_backend_config(group).split(",") if ":" in part
    )
    return by_device.get(device_type, backend)
