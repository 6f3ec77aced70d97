"""The communicators of an engine: how they are opened, and what watches them until they are closed."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from zeroshard.comm.agreement import ControlGroup
from zeroshard.comm.collectives import Comm, first_line, queues_on_device
from zeroshard.comm.connect import connected_device, make_comm, open_link
from zeroshard.comm.hops import NestedComm, TwoHopComm
from zeroshard.comm.host import new_sockets, open_sockets, shut_down
from zeroshard.comm.layer_calls import LayerCalls, forget_layers, watch_layers
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.shm import ShmLink
from zeroshard.comm.stage_messages import Channel, channels_of
from zeroshard.comm.store_keys import Store
from zeroshard.core.mesh import Mesh
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import (
    DistributedError,
    RankDivergence,
    RankLost,
    UsageError,
    ZeroShardError,
)
from zeroshard.session.groups import (
    GroupKind,
    PipelineLinks,
    SessionWatch,
    divergence_text,
    own_group,
)
from zeroshard.watchdog.lone_reads import LoneReadCheck
from zeroshard.watchdog.run_record import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stop_agreement import StopAgreement, StopSignals
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.uncaught import leave_uncaught
from zeroshard.watchdog.watchdog import Watchdog

P = ParamSpec("P")
T = TypeVar("T")
_CONNECTION = re.compile(r"[Cc]onnection (closed|reset)|[Bb]roken pipe|Read error|gloo|NCCL")
"""How errors of torch's transports speak of a connection that broke."""


@dataclass(eq=False)
class CommSession:
    """Communicators of one engine or of one model under construction, and the watch over them.

    ``gathers`` and ``reductions`` are two objects on NCCL if both run at the same time, since the
    collectives of one NCCL communicator run one after the other. Else they are one object. They share one
    recorder: there is one order of calls. Their ranks are a shard group; if it has replicas or nodes,
    they have two hops, and the second hop has a recorder of its own. ``world``
    connects all ranks; without a mesh it is ``gathers``. Else it has a recorder of its own, because the
    groups of a mesh may call different collectives. ``ties``: for each set of pipeline ranks that hold
    a tied weight and of which this rank's is one, the ranks that hold the same part of it.
    ``experts``: for each number of ranks that share the experts of a layer, the ranks that shard the
    same, with a second hop if these have replicas.
    ``copies``: the ranks that hold the same parts as this one: its tensor group first, then the ranks of
    it that share key/value heads.
    ``control_group`` exchanges small texts while a rank may wait for a disk. ``session_watch`` is None
    without a watchdog.
    """

    gathers: Comm
    reductions: Comm
    world: Comm
    copies: list[Comm] = field(default_factory=list)
    ties: dict[tuple[int, ...], Comm] = field(default_factory=dict)
    experts: dict[int, Comm] = field(default_factory=dict)
    session_watch: SessionWatch | None = None
    make_control_group: Callable[[], ControlGroup] = ControlGroup
    groups: list[dist.ProcessGroup] = field(default_factory=list)  # destroyed with the session
    sockets: Mapping[int, str] = field(default_factory=dict)  # of ``groups``
    pipeline: PipelineLinks | None = None  # between the ranks that hold the stages of one model
    layers: Recorder | None = None  # of the collectives of layers, in the program's tensor groups
    leave: list[Callable[[], None]] = field(default_factory=list)  # of layers that use ``groups``
    memory_line: str = ""  # which communicators use registered memory; "": that was not asked for

    def place(self, kind: GroupKind, comms: Sequence[Comm]) -> None:
        """Use ``comms`` for this rank's group of one kind: first "holders" or "node"."""
        if kind.tie:
            self.ties[kind.tie] = comms[0]
        elif kind.experts in self.experts:
            self.experts[kind.experts] = TwoHopComm(self.experts[kind.experts], comms[0])
        elif kind.experts > 1:
            self.experts[kind.experts] = comms[0]
        elif kind.holds_copies:
            self.copies.append(comms[0])
        elif kind.name in ("holders", "node"):
            self.gathers, self.reductions = comms[0], comms[-1]
        elif kind.name == "nodes":
            hops = ((self.gathers, comms[0]), (self.reductions, comms[-1]))
            nested = {pair: NestedComm(*pair) for pair in hops}
            self.gathers, self.reductions = (nested[pair] for pair in hops)
        else:
            inner = (self.gathers, self.reductions)
            made = {comm: TwoHopComm(comm, comms[0]) for comm in inner}
            self.gathers, self.reductions = (made[comm] for comm in inner)

    @property
    def tensor(self) -> Comm | None:
        """This rank's tensor group; None without tensor ranks."""
        return self.copies[0] if self.copies else None

    @cached_property
    def control_group(self) -> ControlGroup:
        """Made at its first use, because it opens a connection to the store.

        Raises:
            RankLost: the process that serves the store has ended.
        """
        try:
            return self.make_control_group()
        except DistributedError:
            raise
        except RuntimeError as error:
            raise RankLost(
                "RankLost: the store that connects the ranks does not answer: "
                f"{first_line(error)}. The process that serves it, often that of rank 0, has ended."
            ) from error

    @property
    def recorder(self) -> Recorder:
        """The record of the collectives over all ranks. It knows step and section."""
        return self.world.recorder

    @property
    def recorders(self) -> list[Recorder]:
        """The records of all that this rank has called and sent."""
        return list(dict.fromkeys(comm.recorder for comm in self.comms))

    @property
    def comms(self) -> list[Comm]:
        """Each communicator once, also the hops of one that has two."""
        apart = (*self.ties.values(), *self.experts.values(), *self.copies)
        comms = (*apart, self.reductions, self.gathers, self.world)
        return _each_once(part for comm in comms for part in (comm, *getattr(comm, "hops", ())))

    @property
    def comms_of_units(self) -> list[Comm]:
        """Those that gather parameters and reduce gradients, and the hops of such with two."""
        comms = (self.gathers, self.reductions, *self.experts.values())
        return _each_once(part for comm in comms for part in getattr(comm, "hops", (comm,)))

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that the communicators keep for messages in flight."""
        return sum(getattr(comm, "scratch_nbytes", 0) for comm in self.comms)

    @property
    def scratch_peak_nbytes(self) -> int:
        """The most bytes that each communicator has kept, added up."""
        return sum(getattr(comm, "scratch_peak_nbytes", 0) for comm in self.comms)

    def divergence(self, comm: Comm, odd: Sequence[int]) -> Exception:
        """The error for the ranks at positions ``odd`` of ``comm``, whose history differs."""
        ranks = getattr(comm, "ranks", None)
        odd = list(odd) if ranks is None else [ranks[at] for at in odd]
        if self.session_watch is None:
            return RankDivergence(divergence_text(odd))
        return self.session_watch.settle(self.session_watch.part_of(comm.recorder), odd)

    def explained(self, call: Callable[P, T]) -> Callable[P, T]:
        """``call``, in which the program's own collectives may fail, as those of a tensor group.

        Their transport knows only that a connection closed. The diagnosis of all ranks is raised instead,
        if there is one.
        """

        @functools.wraps(call)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except RuntimeError as error:
                if (found := self.explanation(error)) is None:
                    raise
                raise found from error

        return guarded

    def explanation(self, error: BaseException | None) -> Exception | None:
        """The diagnosis of all ranks for an error of torch's transports; None: it is another error."""
        if self.session_watch is None or isinstance(error, ZeroShardError):
            return None
        if not isinstance(error, RuntimeError) or not _CONNECTION.search(str(error)):
            return None
        return self.session_watch.ask()

    def note_failure(self, text: str) -> None:
        """Note that a call of this rank ended with an error. Reports of the same step say so."""
        if self.session_watch is not None:
            self.session_watch.note_failure(text)

    def open_group(
        self, groups: Sequence[tuple[int, ...]], rank: int, device: torch.device
    ) -> dist.ProcessGroup:
        """A process group for layers, over that of ``groups`` that ``rank`` is in. Collective.

        It is closed with the session.
        """
        before, world = open_sockets(), dist.group.WORLD
        assert world is not None  # several ranks
        group = own_group(groups, rank, connected_device(world, device))
        assert group is not None  # every rank is in one
        self.groups.append(group)
        self.sockets = {**self.sockets, **new_sockets(before)}
        return group

    def watch_layers(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Record the collectives of layers in these groups, which the program opened for tensor ranks."""
        if self.layers is None:
            return
        weak = weakref.ref(self)

        def explanation(error: RuntimeError) -> Exception | None:
            session = weak()
            return None if session is None else session.explanation(error)

        for group in groups:
            watch_layers(group, LayerCalls(self.layers, explanation))

    def texts_of_all(self, texts: Sequence[str], device: torch.device, *, topic: str) -> list[str]:
        """The texts of all ranks, each once, in the order of ranks. Collective.

        Costs one small exchange of numbers if no rank has a text.
        """
        own = torch.tensor([float(len(texts))], dtype=torch.float64, device=device)
        counts = self.world.all_gather_small(own, name=topic)
        if isinstance(counts, FakeTensor) or not counts.any():
            return list(texts)
        rows = self.control_group.gather(json.dumps(list(texts)), topic=topic)
        united = None
        if rows is not None:
            united = json.dumps(
                list(dict.fromkeys(text for row in rows for text in json.loads(row)))
            )
        found: list[str] = json.loads(self.control_group.broadcast(united, topic=topic))
        return found

    def readers(self) -> LoneReadCheck | None:
        """A check whether all ranks read together; None without a watchdog. Every rank has to use it.

        None on a mesh too: there the reads of several groups have no common order.
        """
        if self.session_watch is None or self.world is not self.gathers:
            return None
        return self.session_watch.readers(self.recorder)

    def stop_agreement(self, signals: StopSignals) -> StopAgreement:
        """The agreement of all ranks to stop after a signal to one of them. Every rank has to use it.

        Raises:
            UsageError: there are several ranks and no watchdog, whose threads agree.
        """
        if self.session_watch is not None:
            return self.session_watch.stop_agreement(signals, self.recorder.rank)
        if self.world.size > 1:
            raise UsageError(
                "the configuration has preemption and trust.watchdog: false, but the threads of the "
                "watchdog agree on the step at which all ranks stop. Remove one of the two keys."
            )
        return StopAgreement(signals)

    def abort_groups(self) -> None:
        """Make every blocked wait in the groups of a mesh fail now.

        Destroying a group of gloo waits for its collectives in flight, which a dead rank never ends.
        """
        shut_down(self.sockets)
        if self.pipeline is not None:
            self.pipeline.abort()

    def close(self, reason: str = "") -> None:
        """End the watch, then the connections. ``reason``: the error that ended this engine, or ""."""
        leave_uncaught(self)
        while self.leave:
            self.leave.pop()()
        if self.session_watch is not None:
            self.session_watch.close(reason)
        for comm in self.comms:
            comm.close()
        if self.pipeline is not None:
            self.pipeline.messages.close()
        if self.layers is not None:
            forget_layers(self.layers)
            self.layers.close()
        if reason:
            self.abort_groups()
        while self.groups:  # closed once more after an error
            with contextlib.suppress(ValueError):  # the program destroyed all groups before us
                dist.destroy_process_group(self.groups.pop())


def _each_once(comms: Iterable[Comm]) -> list[Comm]:
    return list({id(comm): comm for comm in comms}.values())


# ---------------------------------------------------------------- opening


@dataclass(frozen=True, eq=False)
class SetUpRanks:
    """The ranks of one set-up, ``me``, the index of this rank among them, and the set-up's ``number``.

    ``namespace``: its keys in the store.
    """

    ranks: tuple[int, ...]
    me: int
    number: int
    namespace: Store
    call: str
    settings: WatchdogSettings
    watchdog: Watchdog | None

    @property
    def label(self) -> str:
        """The name of what is set up; the same on every rank."""
        return f"{self.call} {self.number}"

    @property
    def recording(self) -> Path | None:
        """The file for this rank's recording of the collectives over all ranks; None: nobody watches."""
        return None if self.watchdog is None else self.watchdog.folder / str(self.number)

    @property
    def check(self) -> Callable[..., None]:
        """A function that raises the fatal diagnosis, if there is one."""
        return self.watchdog.check if self.watchdog is not None else lambda _missing=(): None

    def watched(self) -> AbstractContextManager[object]:
        """A context in which the watchdog follows the set-up."""
        if self.watchdog is None:
            return contextlib.nullcontext()
        return self.watchdog.set_up(self.number + 1, self.call, self.settings)


@dataclass(eq=False)
class SessionOpener:
    """Opens the communicators of one session and notes what is to be closed after an error."""

    crew: SetUpRanks
    peers: Mapping[int, Peer]
    transport: str
    device: torch.device
    home: Recorder  # of the collectives over all ranks
    session_watch: SessionWatch | None
    comms: list[Comm] = field(default_factory=list)
    recorders: list[Recorder] = field(default_factory=list)
    groups: list[dist.ProcessGroup] = field(default_factory=list)
    sockets: dict[int, str] = field(default_factory=dict)  # of ``groups``

    def open(
        self, recorder: Recorder, group: dist.ProcessGroup, purposes: Sequence[str]
    ) -> list[Comm]:
        """One communicator for each purpose, or one for all, if its transport has no queue."""
        settings, opened = self.crew.settings, []
        guard = self.session_watch.explainer(recorder) if self.session_watch is not None else None
        for purpose in purposes:
            comm = make_comm(
                transport=self.transport,
                recorder=recorder,
                group=group,
                purpose=purpose,
                device=self.device,
                guard=guard,
                timeout_s=settings.collective_timeout_s + 60,
                check=self.crew.check,
            )
            self.comms.append(comm)
            opened.append(comm)
            if not queues_on_device(comm):
                break
        return opened

    def watch_group(self, name: str, kind: str, members: tuple[int, ...]) -> Recorder:
        """A recorder of what ``members`` call or send among themselves, which the watch follows.

        ``kind``: distinguishes its file from those of this rank's other groups.
        """
        crew, rank = self.crew, self.crew.ranks[self.crew.me]
        theirs = {
            r: replace(self.peers[r], recording=_beside(self.peers[r], kind)) for r in members
        }
        own = Path(theirs[rank].recording) if theirs[rank].recording else None
        recorder = Recorder(
            name, recording=own, ring=crew.settings.ring, rank=rank, group_size=len(members)
        )
        self.recorders.append(recorder)
        if self.session_watch is not None:
            self.session_watch.parts.append(
                calls_of(
                    recorder, f"{crew.label}, {name}", crew.settings,
                    peers=theirs, home=self.home, members=members,
                )
            )  # fmt: skip
        return recorder

    def open_layers(self, mesh: Mesh, expert_sizes: Sequence[int]) -> Recorder | None:
        """A recorder of the collectives of layers; None without tensor, sequence and expert ranks."""
        rank = self.crew.ranks[self.crew.me]
        found = set(mesh.group(rank, {"tensor", "sequence"}))
        found.update(*(mesh.expert_group(rank, size) for size in expert_sizes))
        members = tuple(sorted(found))
        if len(members) == 1:
            return None
        return self.watch_group(f"layers of {rank_ranges(members)}", "layers", members)

    def open_pipeline(self, mesh: Mesh) -> PipelineLinks:
        """The pipeline of this rank, whose messages the watch follows."""
        rank = self.crew.ranks[self.crew.me]
        recorders = {
            channel: self.watch_group(
                channel.name,
                f"messages-{channel.source}-{channel.target}",
                (channel.source, channel.target),
            )
            for channel in channels_of(mesh.group(rank, {"pipeline"}), rank)
        }
        opened = PipelineLinks.open(mesh, rank, self.session_watch, recorders, self._link)
        self.groups.append(opened.group)
        return opened

    def _link(
        self, channel: Channel, recorder: Recorder, group: dist.ProcessGroup
    ) -> ShmLink | None:
        watch = self.session_watch
        return open_link(
            channel,
            transport=self.transport,
            group=group,
            device=self.device,
            recorder=recorder,
            guard=None if watch is None else watch.explainer(recorder),
            timeout_s=self.crew.settings.collective_timeout_s + 60,
            check=self.crew.check,
        )

    def open_group(self, kind: GroupKind, purposes: Sequence[str]) -> list[Comm]:
        """The communicators of this rank's group, which the watch follows; none if it is in no group."""
        rank = self.crew.ranks[self.crew.me]
        before = open_sockets()
        # Collectives of one process group of a device share a stream, so each purpose has its own.
        world = dist.group.WORLD
        assert world is not None  # several ranks
        connected = connected_device(world, self.device)
        count = 1 if connected is None else len(purposes)
        made = [own_group(kind.groups, rank, connected) for _ in range(count)]
        groups = [group for group in made if group is not None]
        if not groups:
            return []
        self.groups += groups
        self.sockets.update(new_sockets(before))
        members = next(ranks for ranks in kind.groups if rank in ranks)
        recorder = self.watch_group(f"{kind.name} {rank_ranges(members)}", kind.name, members)
        named = [f"{kind.name} {purpose}" for purpose in purposes]
        if count == 1:
            return self.open(recorder, groups[0], named)
        return [
            comm
            for group, purpose in zip(groups, named, strict=True)
            for comm in self.open(recorder, group, [purpose])
        ]

    def give_up(self, error: BaseException) -> None:
        """Close what was opened here, because the session cannot be opened."""
        for comm in self.comms:
            comm.close()
        for recorder in self.recorders:
            recorder.close()
        if self.session_watch is not None:
            self.session_watch.close(f"{type(error).__name__}: {first_line(error)}")


def _beside(peer: Peer, kind: str) -> str:
    """The path of a rank's recording for its group of one kind."""
    return f"{peer.recording}-{kind}" if peer.recording else ""
