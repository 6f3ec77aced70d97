"""Opens the process groups and communicators that a session needs on a mesh, and their recorders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import Comm, first_line, queues_on_device
from zeroshard.comm.connect import connected_device, make_comm, open_link
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.host import new_sockets, open_sockets, shut_down
from zeroshard.comm.recorder import Recorder
from zeroshard.comm.shm_messages import ShmLink
from zeroshard.comm.stage_messages import Channel, StageMessages, channels_of
from zeroshard.core.mesh import SHARDS, Mesh
from zeroshard.errors import RankLost
from zeroshard.session.watch import SessionWatch
from zeroshard.watchdog.rank_status import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.watchdog import Watchdog


@dataclass(frozen=True, eq=False)
class SetUpRanks:
    """The ranks of one set-up, ``me``, the index of this rank among them, and the set-up's ``number``."""

    ranks: tuple[int, ...]
    me: int
    number: int
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


@dataclass(frozen=True)
class GroupKind:
    """A kind of groups: lists of ranks.

    ``tie``: the pipeline ranks that share a tied weight. ``holds_copies``: ranks of a tensor group, some
    of whose parameters are the same. ``experts``: above 1, the groups hold the same experts, and so many
    ranks share those of a layer; those of replicas come second.
    """

    name: str
    groups: Sequence[tuple[int, ...]]
    tie: tuple[int, ...] = ()
    holds_copies: bool = False
    experts: int = 1

    @property
    def carries_units(self) -> bool:
        """Whether units are gathered and reduced in these groups, both at the same time on NCCL."""
        return self.name in ("holders", "node", "nodes")


def groups_of(
    mesh: Mesh,
    ties: Sequence[tuple[int, ...]],
    head_copies: Sequence[int],
    expert_sizes: Sequence[int] = (),
) -> Iterator[GroupKind]:
    """The kinds of groups that a mesh needs besides all ranks.

    ``head_copies``: how many neighbours in a tensor group share key/value heads, each number once.
    ``expert_sizes``: how many ranks share the experts of a layer, likewise.
    """
    if mesh.node > 1:
        ranks = range(mesh.world_size)
        yield GroupKind("node", list(dict.fromkeys(map(mesh.node_group, ranks))))
        yield GroupKind("nodes", list(dict.fromkeys(map(mesh.across_nodes, ranks))))
    elif not mesh.is_flat:
        yield GroupKind("holders", mesh.groups(SHARDS))
    if mesh.data_replicate > 1:
        yield GroupKind("replicas", mesh.groups({"data_replicate"}))
    if mesh.tensor > 1:
        yield GroupKind("tensor", mesh.groups({"tensor"}), holds_copies=True)
    for copies in head_copies:
        if copies < mesh.tensor:
            runs = mesh.tensor_runs(copies)
            yield GroupKind(f"heads-of-{copies}", runs, holds_copies=True)
    for number, tie in enumerate(ties):
        yield GroupKind(f"tied-{number}", mesh.tied_groups(tie), tie)
    for size in expert_sizes:
        yield GroupKind(f"experts-{size}", mesh.expert_holder_groups(size), experts=size)
        if mesh.expert_replicas(size) > 1:
            replicas = mesh.groups({"data_replicate"})
            yield GroupKind(f"experts-{size}-replicas", replicas, experts=size)


def own_group(
    groups: Sequence[Sequence[int]], rank: int, device: torch.device | None = None
) -> dist.ProcessGroup | None:
    """A new process group over the group of ``rank``; None: it is in none.

    Torch requires that all ranks make all groups. ``device``: for which the group connects at once, see
    :func:`~zeroshard.comm.connect.connected_device`.
    """
    own: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(list(ranks), group_desc="zeroshard mesh", device_id=device)
        own = made if rank in ranks else own
    return own


@dataclass(frozen=True, eq=False)
class PipelineLinks:
    """The messages that torch's schedules send in the process group of one pipeline, and its sockets."""

    messages: StageMessages
    sockets: Mapping[int, str]
    session_watch: SessionWatch | None

    @classmethod
    def open(
        cls,
        mesh: Mesh,
        rank: int,
        session_watch: SessionWatch | None,
        recorders: Mapping[Channel, Recorder] | None = None,
        link: Callable[[Channel, Recorder, dist.ProcessGroup], ShmLink | None] | None = None,
    ) -> PipelineLinks:
        """Connect the pipelines of a mesh. Collective over all ranks.

        ``link``: shares memory with the other end of a channel; None: it cannot.
        """
        before = open_sockets()
        group = own_group(mesh.groups({"pipeline"}), rank)
        assert group is not None  # every rank is in one pipeline
        if recorders is None:
            messages = StageMessages.unwatched(group)
        else:
            found = {c: link and link(c, recorders[c], group) for c in sorted(recorders)}
            links = {channel: made for channel, made in found.items() if made is not None}
            messages = StageMessages(group, recorders, links)
        return cls(messages, new_sockets(before), session_watch)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the pipeline."""
        return self.messages.group

    @property
    def ranks(self) -> list[int]:
        """The ranks of the pipeline, in the order of their stages."""
        return dist.get_process_group_ranks(self.group)

    def abort(self, cause: str = "") -> None:
        """Make the waits of the other ranks for a message of this rank fail now, and its own waits.

        ``cause``: this rank's own error, which the other ranks then raise as the reason.
        """
        if cause and self.session_watch is not None:
            self.session_watch.tell_left(cause)
        self.messages.abort()
        shut_down(self.sockets)

    def explain(self, detail: str) -> Exception:
        """The exception for a message that did not arrive, because a rank of the pipeline has ended."""
        peers = [r for r in dist.get_process_group_ranks(self.group) if r != dist.get_rank()]
        found = None
        if self.session_watch is not None:
            found = self.session_watch.ask(peers)
        return found or RankLost(
            f"RankLost: a connection of the pipeline to {rank_ranges(peers)} failed: {detail}"
        )


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
