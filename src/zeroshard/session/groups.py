"""The groups of ranks of a session, and what the watchdog follows of their calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.collectives import lost_text
from zeroshard.comm.host import new_sockets, open_sockets, shut_down
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shm import ShmLink
from zeroshard.comm.stage_messages import Channel, StageMessages
from zeroshard.core.mesh import SHARDS, Mesh
from zeroshard.core.texts import rank_ranges
from zeroshard.errors import RankDivergence, RankLost
from zeroshard.watchdog.lone_reads import LoneReadCheck
from zeroshard.watchdog.messages import StoreLost
from zeroshard.watchdog.pace import Pace, StepMarks
from zeroshard.watchdog.run_record import Peers
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.stop_agreement import StopAgreement, StopSignals
from zeroshard.watchdog.tracked_calls import TrackedCalls
from zeroshard.watchdog.watchdog import Watchdog


class SessionWatch:
    """The sequences of one :class:`~.comm_session.CommSession`.

    ``peers``: every rank's process and the path of its recording, by global rank. ``parts``: the
    sequences, first the collectives over all ranks.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        label: str,
        settings: WatchdogSettings,
        peers: Peers,
        parts: Sequence[TrackedCalls],
    ) -> None:
        self.label = label
        self.settings = settings
        self.peers = peers
        self.parts = list(parts)
        self.errands: list[Callable[[], None]] = []  # run at each look, in the watchdog's thread
        self.pace: Pace | None = None
        self._failed = (-1, "")  # the step in which a call ended with an error, and the error
        self._is_closed = False
        self._watchdog = watchdog
        watchdog.follow(self)

    def start(self, *wakers: Callable[[], object]) -> None:
        """Note ``wakers``, which wake the main thread after a fatal diagnosis.

        Called when the recordings of all ranks exist.
        """
        # A process whose files cannot be seen is in another container: treat it as on another host.
        self.peers = self.peers.with_near(
            {
                r: p.far()
                for r, p in self.peers.near.items()
                if p.process.space and not Path(p.recording).exists()
            }
        )
        for part in self.parts:
            part.peers = (
                self.peers
                if not part.members
                else {
                    rank: replace(self.peers[rank], recording=part.peers[rank].recording)
                    for rank in part.members
                }
            )
            if part.collective:
                part.wakers = wakers

    def check_wait(self) -> None:
        """Raise the fatal diagnosis, if there is one: a wait for the device may have been cut short."""
        if not self._is_closed:
            self._watchdog.check_wait()

    def note_failure(self, text: str) -> None:
        """Note that a call of the current step ended with an error."""
        self._failed = (self._step, text)

    def failure(self) -> str:
        """The error that a call of the current step ended with; "" if there is none."""
        step, text = self._failed
        return text if step == self._step else ""

    @property
    def _step(self) -> int:
        recorder = self.parts[0].recorder
        return -1 if recorder is None else recorder.step

    def part_of(self, recorder: Recorder) -> TrackedCalls:
        """The collectives that ``recorder`` records."""
        return next(part for part in self.parts if part.recorder is recorder)

    def explainer(self, recorder: Recorder) -> PartExplainer:
        """The error explainer of the transport that ``recorder`` records."""
        return PartExplainer(self._watchdog, self.part_of(recorder))

    def ask(self, peers: Sequence[int] = ()) -> Exception | None:
        """The diagnosis of a broken connection to ``peers``, or of the program; None: not known."""
        return self._watchdog.explain(self.parts[0], peers)

    def settle(self, part: TrackedCalls, odd: Sequence[int]) -> Exception:
        """The exception for histories of the ranks ``odd`` that differ from those of the others."""
        return self._watchdog.explain(part) or RankDivergence(divergence_text(odd))

    def readers(self, recorder: Recorder) -> LoneReadCheck:
        """A check whether all ranks read sharded values together. Every rank has to use it.

        ``recorder`` has the collectives of the session.
        """
        label, ranks = self.label, tuple(self.peers)
        watchdog, call = self._weak_watchdog()
        readers = LoneReadCheck(
            call,
            label=label,
            rank=ranks.index(recorder.rank),
            size=len(ranks),
            position=lambda words: watchdog().position(words),
            history=lambda: f"{recorder.seq}-{recorder.hash64:x}",
            gone=lambda at: watchdog().why_gone(label, ranks[at]),
            report_s=self.settings.report_s(),
            limit_s=self.settings.collective_timeout_s,
            rung=lambda: watchdog().messages.rung,
        )
        self.errands.append(readers.answer)
        return readers

    def stop_agreement(self, signals: StopSignals, rank: int) -> StopAgreement:
        """The agreement of all ranks to stop after a signal to one of them. Every rank has to use it.

        ``rank``: the global rank of this process.
        """
        watchdog, call = self._weak_watchdog()
        agreement = StopAgreement(
            signals,
            rank=rank,
            ranks=tuple(self.peers),
            label=self.label,
            call=call,
            check=lambda: watchdog().check(),
            rung=lambda: watchdog().messages.rung,
        )
        self.errands.append(agreement.look)
        return agreement

    def compare_pace(
        self, recorder: Recorder, waits: Sequence[Recorder], groups: Sequence[Sequence[int]]
    ) -> None:
        """Report ranks that are slower than the others of their group. Every rank has to use it.

        ``recorder``: of the collectives over all ranks. ``waits``: recorders whose waits are for other
        ranks. ``groups``: ranks with the same work. Incidents go to ``self.pace.listeners``.
        """
        peers = self.peers
        self.pace = Pace(
            self._weak_watchdog()[1],
            recorder,
            StepMarks(waits),
            label=self.label,
            ranks=tuple(self.peers),
            groups=groups,
            host=lambda rank: peers[rank].process.host,
            ratio=self.settings.straggler_ratio,
            window=self.settings.straggler_window,
            tick_s=self.settings.tick_s,
        )
        self.errands.append(self.pace.look)

    def _weak_watchdog(self) -> tuple[Callable[[], Watchdog], Callable[..., Any]]:
        """What gives the watchdog, and what lets it call the store. Neither keeps it alive."""
        weak = weakref.ref(self._watchdog)

        def watchdog() -> Watchdog:
            if (strong := weak()) is None:
                raise StoreLost("the watchdog has ended")
            return strong

        def call(operation: Callable[[Any], Any], *timeout_s: float) -> Any:
            return watchdog().messages.call(operation, *timeout_s)

        return watchdog, call

    def tell_left(self, reason: str) -> None:
        """Tell the other ranks why this rank makes no further call, before its connections are closed.

        Else they find broken connections and a rank that still runs.
        """
        self._watchdog.tell_left(self, reason)

    def close(self, reason: str = "") -> None:
        """End the watch over this session. ``reason``: the exception that ended this rank's part."""
        self._is_closed = True
        self._watchdog.leave(self, reason)
        self._watchdog.release()


@dataclass(frozen=True, eq=False)
class PartExplainer:
    """The error explainer of one transport: asks what the ranks do in ``part``, its calls."""

    watchdog: Watchdog
    part: TrackedCalls

    def explain(self, item: Item, peers: Sequence[int], detail: str) -> Exception:
        """The exception for a connection to one of ``peers`` (global ranks) that broke in ``item``."""
        error = self.watchdog.explain(self.part, peers)
        return error or RankLost(lost_text(item, peers, detail))


def divergence_text(odd: Sequence[int]) -> str:
    """The message when hashes differ and no rank can be asked."""
    return (
        f"RankDivergence: {rank_ranges(odd)} called other collectives than the other ranks since "
        "the last check.\n  Run the same modules in the same order on every rank."
    )


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
