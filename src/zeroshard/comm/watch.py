"""How does an engine open its communicators, and who watches the other ranks meanwhile?"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from zeroshard.comm.agree import FAILED, Store, agree_plan, exchange, meeting, post_plan
from zeroshard.comm.collectives import Comm
from zeroshard.comm.connect import default_store, make_comm
from zeroshard.comm.env import run_name
from zeroshard.comm.evidence import Peer
from zeroshard.comm.forum import Forum
from zeroshard.comm.host import Process, this_process
from zeroshard.comm.recorder import Recorder, box_dir, sweep_boxes
from zeroshard.comm.sentinel import Sentinel, divergence_text
from zeroshard.comm.side import look
from zeroshard.comm.trust import TrustSettings
from zeroshard.config.sections import TrustConfig
from zeroshard.core.verdict import FOR_ALL
from zeroshard.errors import RankDivergence


@dataclass(eq=False)
class Watch:
    """Communicators of one engine, and the sentinel over them.

    Gathers and reductions are one object on gloo and have their own on NCCL, where collectives of
    one communicator run one after the other. They share one recorder: there is one order of calls.
    ``forum`` is for facts that ranks tell each other while one of them may wait for a disk.
    """

    gathers: Comm
    reductions: Comm
    sentinel: Sentinel | None = None
    forum: Forum = field(default_factory=Forum)
    _pending: tuple[Tensor, torch.cuda.Event] | None = None
    _farewell: Any = None

    @property
    def recorder(self) -> Recorder:
        """What this rank has called and sent."""
        return self.gathers.recorder

    @property
    def scratch_nbytes(self) -> int:
        """Memory that the communicators keep for messages on their way."""
        comms = {id(comm): comm for comm in (self.gathers, self.reductions)}
        return sum(getattr(comm, "scratch_nbytes", 0) for comm in comms.values())

    def history(self) -> int:
        """Running hash of what this rank has called, below 2**32: exact in float64."""
        return int(self.recorder.hash32)

    def check(self, hashes_W: Tensor) -> None:
        """Compare the hashes that all ranks gave at one point, one per rank, float64 or integers.

        On CUDA the comparison is that of the call before: nothing waits for the device.

        Raises:
            RankDivergence: some ranks called other collectives than the others.
        """
        if self.gathers.transport == "fake":
            return
        if not hashes_W.is_cuda:
            self._compare(hashes_W)
            return
        if torch.cuda.is_current_stream_capturing():
            return
        if self._pending is not None:
            copy, copied = self._pending
            if not copied.query():
                return
            self._compare(copy)
        copy = torch.empty(hashes_W.shape, dtype=hashes_W.dtype, pin_memory=True)
        copy.copy_(hashes_W, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self._pending = (copy, copied)

    def _compare(self, hashes_W: Tensor) -> None:
        values = hashes_W.tolist()
        if min(values) == max(values):
            return
        common = max(values, key=values.count)
        ranks = getattr(self.gathers, "ranks", range(len(values)))
        odd = [rank for rank, value in zip(ranks, values, strict=True) if value != common]
        if self.sentinel is None:
            raise RankDivergence(divergence_text(odd))
        raise self.sentinel.settle(odd)

    def step(self, number: int) -> None:
        """A step begins: messages name it, and the time of the first report follows the pace."""
        self.recorder.mark_step(number)

    @contextlib.contextmanager
    def section(self, name: str) -> Any:
        """What the rank does inside is ``name`` (``save``, ``eval``...): it has its own limit."""
        outer = self.recorder.section.removesuffix(FOR_ALL)
        self.recorder.mark_section(name)
        try:
            yield
        finally:
            self.recorder.mark_section(outer)

    def close(self, reason: str = "") -> None:
        """End the watch, then the connections. ``reason``: the error that ends this engine."""
        if self._farewell is not None:
            atexit.unregister(self._farewell)
            self._farewell = None
        if self.sentinel is not None:
            self.sentinel.close(reason)
        if self.reductions is not self.gathers:
            self.reductions.close()
        self.gathers.close()


def open_watch(
    *,
    transport: str,
    device_type: str,
    trust: TrustConfig | TrustSettings,
    plan: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
) -> Watch:
    """Open communicators after all ranks have agreed on ``plan``. Collective.

    Raises:
        RankMismatch: another rank has another plan.
        RankLate: a rank did not come.
    """
    settings = trust if isinstance(trust, TrustSettings) else TrustSettings.from_config(trust)
    settings = settings.with_environment()
    if not _several(group):
        comm = make_comm(transport=transport, device_type=device_type, group=group)
        return Watch(comm, comm)
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # _several
    ranks = dist.get_process_group_ranks(group)
    me, world_size = dist.get_rank(group), len(ranks)
    name = run_name()
    setup_s = settings.sections.get("setup", settings.collective_timeout_s)

    store = default_store()
    place = _meeting_place(ranks, me)
    agree_plan(place, me, world_size, plan, timeout_s=setup_s)
    token = secrets.token_hex(4) if me == 0 else ""
    card = json.dumps([token, asdict(this_process())])
    cards = [
        json.loads(text)
        for text in exchange(place, me, world_size, card, key="cards", timeout_s=setup_s)
    ]
    folder = box_dir(f"{name.run or 'run'}-{cards[0][0]}".replace("/", "_"))
    peers = [
        Peer(rank, Process(**process), str(folder / str(rank)))
        for rank, (_, process) in zip(ranks, cards, strict=True)
    ]
    sweep_boxes()
    recorder = Recorder(
        box=folder / str(ranks[me]),
        ring=settings.ring,
        rank=ranks[me],
        world_size=world_size,
    )
    sentinel = None
    if settings.watchdog:
        sentinel = Sentinel(
            cast("Store", PrefixStore("sentinel", _own_client(cast("Any", place)))),
            rank=ranks[me],
            peers=peers,
            recorder=recorder,
            trust=settings,
            store_rank=_store_rank(store),
        )
    comms = []
    for purpose in ("gathers", "reductions"):
        comm = make_comm(
            transport=transport,
            recorder=recorder,
            group=group,
            purpose=purpose,
            device_type=device_type,
            guard=sentinel,
            timeout_s=settings.collective_timeout_s + 60,
        )
        comms.append(comm)
        if comm.transport != "nccl":
            break
    client = _own_client(cast("Any", place))
    forum = Forum(
        cast("Store", PrefixStore("forum", client)),
        rank=me,
        world_size=world_size,
        gone=_gone(peers, peers[me].process, cast("Store", PrefixStore("sentinel", client))),
        note=_note(recorder),
        timeout_s=settings.sections.get("save", settings.collective_timeout_s),
    )
    watch = Watch(comms[0], comms[-1], sentinel, forum)
    if sentinel is not None:
        if comms[0].transport == "nccl":
            recorder.watch_device()
        sentinel.start(*(comm.abort for comm in comms if hasattr(comm, "abort")))
        watch._farewell = _close_at_exit(watch)
    return watch


def _gone(peers: Sequence[Peer], here: Process, sentinels: Store) -> Callable[[int], str]:
    """Why a rank will not answer any more; see :class:`Forum`."""

    def gone(rank: int) -> str:
        fate, detail = peers[rank].fate(here)
        if fate == "gone":
            return detail
        return look(sentinels, f"left/{peers[rank].rank}") or ""

    return gone


def _note(recorder: Recorder) -> Callable[[bool], None]:
    """Says in the recorder's section, if there is one, that it waits for all; see :class:`Forum`."""

    def note(waits: bool) -> None:
        section = recorder.section.removesuffix(FOR_ALL)
        if section:
            recorder.mark_section(section + FOR_ALL if waits else section)

    return note


def decline(reason: str, group: dist.ProcessGroup | None = None) -> None:
    """Tell the ranks that come to :func:`open_watch` that this one failed. Waits for nobody."""
    if not _several(group):
        return
    me, ranks = dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)
    post_plan(_meeting_place(ranks, me), me, {FAILED: reason})


def _meeting_place(ranks: Sequence[int], me: int) -> Store:
    """Where these ranks of this attempt meet next."""
    name = run_name()
    label = f"zs/{name.run}/{name.attempt}/watch/{','.join(map(str, ranks))}"
    return meeting(default_store(), label, me)


def _several(group: dist.ProcessGroup | None) -> bool:
    return (
        dist.is_available()
        and dist.is_initialized()
        and dist.get_backend(group) != "fake"
        and dist.get_world_size(group) > 1
    )


def _own_client(store: Any) -> Any:
    """A second connection: a client that two threads share deadlocks."""
    return store.clone() if hasattr(store, "clone") else store


def _store_rank(store: Any) -> int | None:
    """The rank that serves the store, unless the launcher or a file does."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    in_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, TCPStore) and not in_agent else None


def _close_at_exit(watch: Watch) -> Any:
    """Say goodbye when the program ends without closing its engine, and why it ended."""
    weak, owner = weakref.ref(watch), os.getpid()

    def farewell() -> None:
        strong = weak()
        if strong is not None and os.getpid() == owner:
            error = getattr(sys, "last_value", None)
            strong.close("" if error is None else f"{type(error).__name__}: {error}"[:120])

    atexit.register(farewell)
    return farewell
