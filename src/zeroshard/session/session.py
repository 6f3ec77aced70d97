"""Opens the communicators of an engine or a model, and lets the watchdog follow their calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.comm.agreement import ControlGroup, agree_plan, cards_of, post_plan
from zeroshard.comm.collectives import Comm, queues_on_device
from zeroshard.comm.connect import DeviceUse, check_devices, default_store, device_use, make_comm
from zeroshard.comm.env import run_name
from zeroshard.comm.host import Process, this_process
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.store_keys import FAILED, Rendezvous, Store, look, numbered_namespace, ranks_key
from zeroshard.config.sections import TrustConfig
from zeroshard.core.mesh import DIMS, Mesh
from zeroshard.core.texts import rank_ranges
from zeroshard.device.choice import ops_of
from zeroshard.errors import (
    DistributedError,
    LaunchError,
)
from zeroshard.run.recordings import PRESENCE, sweep_recordings
from zeroshard.session.comm_session import CommSession, SessionOpener, SetUpRanks
from zeroshard.session.groups import GroupKind, PipelineLinks, SessionWatch, groups_of, own_group
from zeroshard.session.join import own_client, place_of, store_rank, watchdog_of
from zeroshard.version import __version__
from zeroshard.watchdog.messages import LEAVERS, watchdog_namespace
from zeroshard.watchdog.run_record import Peer, Peers, RanksFile, write_ranks
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.uncaught import watch_uncaught

_END_OF_ERROR = "\0"


def open_session(
    *,
    transport: str,
    device: torch.device,
    trust: TrustConfig | WatchdogSettings,
    plan: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    call: str = "initialize",
    separate_reductions: bool = False,
    mesh: Mesh | None = None,
    kinds: Sequence[GroupKind] | None = None,
    details: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> CommSession:
    """Open communicators after all ranks have agreed on ``plan``. Collective.

    ``details``: see :func:`~zeroshard.comm.agreement.agree_plan`. ``call``: the function that the program
    called. Only ``initialize`` gets a control group. ``mesh``: of all ranks; None: all of them hold the
    same parameters. ``kinds``: of groups that the model needs (:func:`~.opener.groups_of`); None: those
    that every model needs. ``separate_reductions``: gathers and reductions run at the same time, so on
    NCCL ``initialize`` opens a second communicator for reductions.

    Raises:
        RankMismatch: another rank has another plan or another ``call``.
        RankLate: a rank did not call this in time.
        LaunchError: two ranks train on one device, and the backend needs one for each.
    """
    settings = trust if isinstance(trust, WatchdogSettings) else WatchdogSettings.from_config(trust)
    settings = settings.with_environment()
    mesh = mesh or Mesh()
    kinds = list(groups_of(mesh, (), ())) if kinds is None else kinds
    purposes = _purposes(call, separate_reductions)
    if not _several(group):
        return _unwatched(transport, device, group, mesh, kinds, purposes)
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # _several
    crew = _crew(group, call, settings)
    crew.check()
    with crew.watched(), contextlib.ExitStack() as undo:
        if crew.watchdog is not None:
            undo.callback(crew.watchdog.release)
        sweep_recordings()
        # Before the agreement: a rank that has agreed finds the recordings of all ranks of its host.
        recorder = Recorder(
            recording=crew.recording,
            ring=settings.ring,
            rank=crew.ranks[crew.me],
            group_size=len(crew.ranks),
        )
        undo.callback(recorder.close)
        peers = _agree(crew, plan, device_use(group, device), details)
        session = _open(crew, peers, recorder, group, transport, device, purposes, mesh, kinds)
        undo.pop_all()
        return session


@contextlib.contextmanager
def set_up_together(
    call: str, *, trust: TrustConfig, plan: Mapping[str, str]
) -> Iterator[Callable[[Sequence[int]], None]]:
    """A context in which all ranks do a part of a set-up, after they have agreed on ``plan``. Collective.

    The watchdog follows it. Waits inside should call what this yields a few times a second: it raises the
    fatal diagnosis, if there is one. ``call``: what the program called, for messages.

    Raises:
        RankMismatch: another rank has another plan, makes another call, or failed before.
        DistributedError: the diagnosis of ranks that did not come.
    """
    settings = WatchdogSettings.from_config(trust).with_environment()
    if not _several(None):
        yield lambda _missing: None
        return
    world = dist.group.WORLD
    assert world is not None  # _several
    crew = _crew(world, call, settings)
    with crew.watched():
        try:
            crew.check()
            limit_s = settings.limit_s("setup")
            meeting = Rendezvous(crew.namespace, crew.me, len(crew.ranks), limit_s, crew.check)
            agree_plan(meeting, {"call": call, **plan})
        except DistributedError as error:
            error.on_all_ranks = True
            if crew.watchdog is not None:
                crew.watchdog.release()
            raise
        yield crew.check


def _crew(group: dist.ProcessGroup, call: str, settings: WatchdogSettings) -> SetUpRanks:
    """The ranks of the next set-up of ``group``, with their watchdog."""
    ranks, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    watchdog = watchdog_of(ranks, settings, _run_space()) if settings.watchdog else None
    return SetUpRanks(ranks, me, *_store_namespace(ranks, me), call, settings, watchdog)


def _agree(
    crew: SetUpRanks,
    plan: Mapping[str, str],
    own_device: DeviceUse,
    details: Mapping[str, Sequence[str]],
) -> Peers:
    """The process and recording of every rank, by global rank, after all have agreed on ``plan``.

    A rank gets the processes of its own host, and the hosts of the others: with W ranks, W whole cards
    for each would be gigabytes for a few thousand ranks.
    """
    here, size, namespace = this_process(), len(crew.ranks), crew.namespace
    card = json.dumps([asdict(here), str(crew.recording or ""), own_device])

    def sum_up(cards: list[str]) -> str:
        summary, near = _summary(crew.ranks, cards)
        namespace.multi_set([f"near/{space}" for space in near], list(near.values()))
        return summary

    shared = {
        "call": crew.call,
        "device type": own_device.kind,
        "version of zeroshard": __version__,
        "version of torch": torch.__version__.partition("+")[0],
    }
    meeting = Rendezvous(namespace, crew.me, size, crew.settings.limit_s("setup"), crew.check)
    told = agree_plan(meeting, {**shared, **plan}, card=card, sum_up=sum_up, details=details)
    refused, _, runs = told.partition(_END_OF_ERROR)
    if refused:
        raise LaunchError(refused)
    if crew.me == 0 and crew.watchdog is not None:
        write_ranks(crew.settings.dump_dir, _ranks_file(crew, cards_of(namespace)))
    near = json.loads(look(namespace, f"near/{here.space}") or "[]")
    peers = {rank: Peer(rank, Process(**process), path) for rank, process, path in near}
    assert crew.ranks[crew.me] in peers
    return Peers(peers, crew.ranks, runs)


def _summary(ranks: Sequence[int], cards: Sequence[str]) -> tuple[str, dict[str, str]]:
    """What every rank has to know of all, and what the ranks of each host, by ``Process.space``.

    Of all: an error or "", and as JSON runs of ranks: first rank, last rank and host. Of one's own host,
    as JSON: rank, process and path of the recording of each rank. ``cards``: of ``ranks``.
    """
    by_rank = {rank: json.loads(card) for rank, card in zip(ranks, cards, strict=True)}
    refused = ""
    try:
        check_devices({rank: DeviceUse(*use) for rank, (_, _, use) in by_rank.items()})
    except LaunchError as error:
        refused = str(error)
    near: dict[str, list[Any]] = {}
    runs: list[list[Any]] = []
    for rank in sorted(by_rank):
        process, path, _ = by_rank[rank]
        near.setdefault(process["space"], []).append([rank, process, path])
        if runs and runs[-1][1:] == [rank - 1, process["host"]]:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank, process["host"]])
    told = refused + _END_OF_ERROR + json.dumps(runs)
    return told, {space: json.dumps(rows) for space, rows in near.items()}


def _unwatched(
    transport: str,
    device: torch.device,
    group: dist.ProcessGroup | None,
    mesh: Mesh,
    kinds: Sequence[GroupKind],
    purposes: Sequence[str],
) -> CommSession:
    """The session of one rank, or of a fake group, in which one process plays one of many ranks."""

    def opened(
        group: dist.ProcessGroup | None, recorder: Recorder | None, wanted: Sequence[str]
    ) -> list[Comm]:
        options: dict[str, Any] = {"transport": transport, "group": group, "device": device}
        first = make_comm(recorder=recorder, **options)
        more = wanted[1:] if queues_on_device(first) else ()
        return [first, *(make_comm(recorder=first.recorder, **options) for _ in more)]

    world = opened(group, None, purposes if mesh.is_flat else ())
    session = CommSession(world[0], world[-1], world[0])
    for kind in kinds:
        own = own_group(kind.groups, dist.get_rank())
        if own is None:
            continue
        session.groups.append(own)
        recorder = Recorder(f"{kind.name} {rank_ranges(dist.get_process_group_ranks(own))}")
        session.place(kind, opened(own, recorder, purposes if kind.carries_units else ()))
    if mesh.pipeline > 1:
        session.pipeline = PipelineLinks.open(mesh, dist.get_rank(), None)
        session.groups.append(session.pipeline.group)
    return session


def _open(
    crew: SetUpRanks,
    peers: Peers,
    recorder: Recorder,
    group: dist.ProcessGroup,
    transport: str,
    device: torch.device,
    purposes: Sequence[str],
    mesh: Mesh,
    kinds: Sequence[GroupKind],
) -> CommSession:
    rank, size = crew.ranks[crew.me], len(crew.ranks)
    meetings = Recorder("meetings", ring=64, rank=rank, group_size=size)
    session_watch = _session_watch(crew, peers, recorder, meetings)
    opener = SessionOpener(crew, peers, transport, device, recorder, session_watch)
    try:
        opened = opener.open(recorder, group, purposes if mesh.is_flat else ("world",))
        session = CommSession(opened[0], opened[-1], opened[0], session_watch=session_watch)
        for kind in kinds:
            wanted = purposes if kind.carries_units else ("exchange",)
            if found := opener.open_group(kind, wanted):
                session.place(kind, found)
        session.layers = opener.open_layers(mesh, [k.experts for k in kinds if k.experts > 1])
        if mesh.pipeline > 1:
            session.pipeline = opener.open_pipeline(mesh)
    except BaseException as error:
        opener.give_up(error)
        raise
    session.groups, session.sockets = opener.groups, opener.sockets
    watch_uncaught(session)
    if crew.call == "initialize":
        session.make_control_group = partial(_control_group, crew, peers, meetings)
    if session_watch is not None:
        _watch_calls(session, session_watch, crew, device, mesh)
        aborts = [comm.abort for comm in opener.comms if hasattr(comm, "abort")]
        session_watch.start(*aborts, session.abort_groups)
    return session


def _session_watch(
    crew: SetUpRanks, peers: Peers, recorder: Recorder, meetings: Recorder
) -> SessionWatch | None:
    """What watches the collectives of a session and the meetings of its control group, if that is on."""
    if crew.watchdog is None:
        return None
    label, settings = crew.label, crew.settings
    parts = [
        calls_of(recorder, label, settings, peers=peers),
        calls_of(meetings, f"{label}, control group", settings, peers=peers, home=recorder),
    ]
    return SessionWatch(crew.watchdog, label, settings, peers, parts)


def _watch_calls(
    session: CommSession,
    session_watch: SessionWatch,
    crew: SetUpRanks,
    device: torch.device,
    mesh: Mesh,
) -> None:
    """Watch what queues on a device until it has run there; on the CPU compare the pace of ranks."""
    messages = session.pipeline.messages.recorders if session.pipeline is not None else {}
    layers = () if session.layers is None else (session.layers,)
    every = (*session.recorders, *messages.values(), *layers)
    if queues_on_device(session.world):
        for each in every:
            each.watch_device(ops_of(device))
        ops_of(device).guard_waits(session_watch)
    elif crew.call == "initialize":
        same_work = mesh.groups(set(DIMS) - {"pipeline"}) if mesh.pipeline > 1 else [crew.ranks]
        session_watch.compare_pace(session.recorder, every, same_work)


def _ranks_file(crew: SetUpRanks, cards: Mapping[int, str]) -> RanksFile:
    """What rank 0 writes for other processes: the process of every rank, also of other hosts.

    ``cards``: of all ranks, by index among them.
    """
    name, presences = run_name(), {}
    for at, card in cards.items():
        process, path, _ = json.loads(card)
        presence = str(Path(path).with_name(PRESENCE))
        presences[crew.ranks[at]] = Peer(crew.ranks[at], Process(**process), presence)
    return RanksFile(
        place_of(default_store(), watchdog_namespace(crew.ranks, _run_space())),
        name.attempt,
        crew.settings.stacks,
        presences,
        {str(crew.number): crew.label},
        store_rank(default_store()),
    )


def _purposes(call: str, separate_reductions: bool) -> tuple[str, ...]:
    """What a session opens communicators for. Each one costs device memory and connections."""
    if call != "initialize":
        return ("init",)
    return ("gathers", "reductions") if separate_reductions else ("gathers",)


def _control_group(crew: SetUpRanks, peers: Peers, meetings: Recorder) -> ControlGroup:
    client = own_client(default_store())
    space = watchdog_namespace(crew.ranks, _run_space())
    left = cast("Store", PrefixStore(f"{space}/left/{crew.label}", client))
    here = peers[crew.ranks[crew.me]].process
    near = {at: peers.near[rank] for at, rank in enumerate(crew.ranks) if rank in peers.near}
    known: tuple[int, dict[int, str]] = 0, {}  # how many have left, and why

    def gone() -> dict[int, str]:
        """Costs one request as long as no rank has left."""
        nonlocal known
        fates = {at: peer.fate(here) for at, peer in near.items()}
        ended = {at: detail for at, (fate, detail) in fates.items() if fate == "gone"}
        try:
            if (count := left.add(LEAVERS, 0)) != known[0]:
                whys = {at: look(left, str(rank)) for at, rank in enumerate(crew.ranks)}
                known = count, {at: why for at, why in whys.items() if why}
        except RuntimeError:  # a process that has ended on this host is known without the store
            if not ended:
                raise
        return dict(sorted((known[1] | ended).items()))

    return ControlGroup(
        cast("Store", PrefixStore(f"{space}/control_group/{crew.label}", client)),
        rank=crew.me,
        size=len(crew.ranks),
        first=crew.ranks[0],
        gone=gone,
        recorder=meetings,
        check=crew.check,
        timeout_s=max(crew.settings.limit_s(section) for section in ("save", "load", "export")),
    )


def decline(reason: str, group: dist.ProcessGroup | None = None) -> None:
    """Let :func:`open_session` fail on the other ranks, because this rank failed. Does not wait."""
    if not _several(group):
        return
    me, ranks = dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    post_plan(Rendezvous(_store_namespace(ranks, me)[1], me, len(ranks)), {FAILED: reason})


def _store_namespace(ranks: Sequence[int], me: int) -> tuple[int, Store]:
    """How many sessions these ranks opened before in this attempt, and the key space of the next one."""
    label = f"{_run_space()}/watch/{ranks_key(ranks)}"
    return numbered_namespace(default_store(), label, me)


def _run_space() -> str:
    """The prefix in the store of the keys of this attempt at this run."""
    name = run_name()
    return f"zs/{name.run}/{name.attempt}"


def _several(group: dist.ProcessGroup | None) -> bool:
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_backend(group) != "fake"
        and dist.get_world_size(group) > 1
    )
