"""Opens the communicators of an engine or a model, and lets the watchdog follow their calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from zeroshard.comm.agreement import FAILED, Store, agree_plan, numbered_namespace, post_plan
from zeroshard.comm.collectives import Comm, first_line
from zeroshard.comm.connect import default_store, make_comm
from zeroshard.comm.control_group import ControlGroup
from zeroshard.comm.env import run_name
from zeroshard.comm.host import Process, this_process
from zeroshard.comm.recorder import Recorder, sweep_recordings
from zeroshard.config.sections import TrustConfig
from zeroshard.errors import RankDivergence
from zeroshard.watchdog.diagnosis import MEETINGS
from zeroshard.watchdog.lone_reads import LoneReadCheck
from zeroshard.watchdog.rank_status import Peer
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.watchdog.startup import own_client, watchdog_namespace, watchdog_of
from zeroshard.watchdog.store_client import look
from zeroshard.watchdog.tracked_calls import calls_of
from zeroshard.watchdog.watchdog import SessionWatch, Watchdog, divergence_text


@dataclass(eq=False)
class CommSession:
    """Communicators of one engine or of one model under construction, and the watch over them.

    ``gathers`` and ``reductions`` are one object on gloo and two on NCCL, where the collectives of one
    communicator run one after the other. They share one recorder: there is one order of calls.
    ``control_group`` exchanges small texts while a rank may wait for a disk. ``session_watch`` is None
    without a watchdog.
    """

    gathers: Comm
    reductions: Comm
    session_watch: SessionWatch | None = None
    control_group: ControlGroup = field(default_factory=ControlGroup)
    _pending: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def recorder(self) -> Recorder:
        """The record of what this rank has called and sent."""
        return self.gathers.recorder

    @property
    def scratch_nbytes(self) -> int:
        """Bytes that the communicators keep for messages in flight."""
        comms = {id(comm): comm for comm in (self.gathers, self.reductions)}
        return sum(getattr(comm, "scratch_nbytes", 0) for comm in comms.values())

    def history(self) -> int:
        """The upper 32 bits of the history hash of this rank; float64 holds them exactly."""
        return int(self.recorder.hash32)

    def check(self, hashes_W: Tensor) -> None:
        """Compare ``hashes_W``, the :meth:`history` of every rank at the same point, float64 or integers.

        On CUDA the hashes of an earlier call are compared, so that the host does not wait for the device.

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
        if self.session_watch is None:
            raise RankDivergence(divergence_text(odd))
        raise self.session_watch.settle(odd)

    def step(self, number: int) -> None:
        """Note that step ``number`` begins. Messages name it, and the time between steps decides when a
        stall is first reported."""
        self.recorder.mark_step(number)

    @contextlib.contextmanager
    def section(self, name: str) -> Any:
        """A context in which this rank is in section ``name`` (``save``, ``eval``...), which has its own
        limit."""
        outer = self.recorder.section
        self.recorder.mark_section(name)
        try:
            yield
        finally:
            self.recorder.mark_section(outer)

    def readers(self) -> LoneReadCheck | None:
        """A check whether all ranks read together; None without a watchdog. Every rank has to use it."""
        return self.session_watch.readers(self.recorder) if self.session_watch is not None else None

    def close(self, reason: str = "") -> None:
        """End the watch, then the connections. ``reason``: the error that ended this engine, or ""."""
        if self.session_watch is not None:
            self.session_watch.close(reason)
        if self.reductions is not self.gathers:
            self.reductions.close()
        self.gathers.close()


def open_session(
    *,
    transport: str,
    device_type: str,
    trust: TrustConfig | WatchdogSettings,
    plan: Mapping[str, str],
    group: dist.ProcessGroup | None = None,
    call: str = "initialize",
) -> CommSession:
    """Open communicators after all ranks have agreed on ``plan``. Collective.

    ``call``: the function that the program called. Only ``initialize`` gets a second communicator for
    reductions (on NCCL), and a control group.

    Raises:
        RankMismatch: another rank has another plan or another ``call``.
        RankLate: a rank did not call this in time.
    """
    settings = trust if isinstance(trust, WatchdogSettings) else WatchdogSettings.from_config(trust)
    settings = settings.with_environment()
    if not _several(group):
        comm = make_comm(transport=transport, device_type=device_type, group=group)
        return CommSession(comm, comm)
    group = group if group is not None else dist.group.WORLD
    assert group is not None  # _several
    ranks = tuple(dist.get_process_group_ranks(group))
    watchdog = watchdog_of(ranks, settings, _run_space()) if settings.watchdog else None
    if watchdog is not None:
        watchdog.check()
    number, place = _store_namespace(ranks, dist.get_rank(group))
    crew = _Setup(ranks, dist.get_rank(group), number, call, settings, watchdog)
    with watchdog.set_up(number + 1, call, settings) if watchdog else contextlib.nullcontext():
        try:
            return _open(crew, _agree(crew, place, plan), group, transport, device_type)
        except BaseException:
            if watchdog is not None:
                watchdog.release()
            raise


@dataclass(frozen=True, eq=False)
class _Setup:
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
    def check(self) -> Callable[..., None]:
        """A function that raises the fatal diagnosis, if there is one."""
        return self.watchdog.check if self.watchdog is not None else lambda _missing=(): None


def _agree(crew: _Setup, place: Store, plan: Mapping[str, str]) -> dict[int, Peer]:
    """The process and recording of every rank, by global rank, after all have agreed on ``plan``."""
    limit_s = crew.settings.limit_s("setup")
    recording = str(crew.watchdog.folder / str(crew.number)) if crew.watchdog is not None else ""
    place.set(f"card/{crew.me}", json.dumps([asdict(this_process()), recording]))
    agree_plan(
        place, crew.me, len(crew.ranks), {"call": crew.call, **plan},
        timeout_s=limit_s, check=crew.check,
    )  # fmt: skip
    cards = [json.loads(place.get(f"card/{at}")) for at in range(len(crew.ranks))]
    return {
        rank: Peer(rank, Process(**process), recording)
        for rank, (process, recording) in zip(crew.ranks, cards, strict=True)
    }


def _open(
    crew: _Setup,
    peers: Mapping[int, Peer],
    group: dist.ProcessGroup,
    transport: str,
    device_type: str,
) -> CommSession:
    sweep_recordings()
    settings, rank, world_size = crew.settings, crew.ranks[crew.me], len(crew.ranks)
    recording = Path(peers[rank].recording) if peers[rank].recording else None
    recorder = Recorder(recording=recording, ring=settings.ring, rank=rank, world_size=world_size)
    meetings = Recorder("meetings", ring=64, rank=rank, world_size=world_size)
    session_watch = None
    if crew.watchdog is not None:
        parts = [
            calls_of(recorder, crew.label, settings, peers=peers),
            calls_of(meetings, crew.label + MEETINGS, settings, peers=peers, home=recorder),
        ]
        session_watch = SessionWatch(crew.watchdog, crew.label, settings, peers, parts)
    engine = crew.call == "initialize"
    comms: list[Comm] = []
    try:
        for purpose in ("gathers", "reductions") if engine else ("init",):
            comm = make_comm(
                transport=transport,
                recorder=recorder,
                group=group,
                purpose=purpose,
                device_type=device_type,
                guard=session_watch,
                timeout_s=settings.collective_timeout_s + 60,
                check=crew.check,
            )
            comms.append(comm)
            if comm.transport != "nccl":
                break
        control_group = _control_group(crew, peers, meetings) if engine else ControlGroup()
    except BaseException as error:
        for comm in comms:
            comm.close()
        recorder.close()
        if session_watch is not None:
            session_watch.close(f"{type(error).__name__}: {first_line(error)}")
        raise
    watch = CommSession(comms[0], comms[-1], session_watch, control_group)
    if session_watch is not None:
        if comms[0].transport == "nccl":
            recorder.watch_device()
        session_watch.start(*(comm.abort for comm in comms if hasattr(comm, "abort")))
    return watch


def _control_group(crew: _Setup, peers: Mapping[int, Peer], meetings: Recorder) -> ControlGroup:
    client = own_client(default_store())
    space = watchdog_namespace(crew.ranks, _run_space())
    left = cast("Store", PrefixStore(f"{space}/left/{crew.label}", client))
    here = peers[crew.ranks[crew.me]].process

    def gone(at: int) -> str:
        fate, detail = peers[crew.ranks[at]].fate(here)
        return detail if fate == "gone" else look(left, str(crew.ranks[at])) or ""

    return ControlGroup(
        cast("Store", PrefixStore(f"{space}/forum/{crew.label}", client)),
        rank=crew.me,
        world_size=len(crew.ranks),
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
    post_plan(_store_namespace(ranks, me)[1], me, {FAILED: reason})


def _store_namespace(ranks: Sequence[int], me: int) -> tuple[int, Store]:
    """How many sessions these ranks opened before in this attempt, and the key space of the next one."""
    label = f"{_run_space()}/watch/{','.join(map(str, ranks))}"
    return numbered_namespace(cast("Store", default_store()), label, me)


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
