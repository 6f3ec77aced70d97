"""The processes of a run, and what it leaves for others: ``ranks.json``, and recordings after failures.

``zeroshard stacks`` reads ``ranks.json`` to find a running job; ``zeroshard explain`` reads both after
its end.

    ranks.json                   the store, and every rank's process and directory of recordings
    recordings/rank-R-PID/       of a rank that did not end cleanly: its recordings (gzip) and end.json

Recordings are written in shared memory (:mod:`zeroshard.comm.recorder`) and removed when a rank leaves.
A rank that leaves with an error copies its own first. The last rank that leaves a host copies those of
ranks that died there. If no rank is left to do so they stay in shared memory, where ``ranks.json`` says.
Every function is quiet about a disk that is full or cannot be written: a run must not fail because of it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import socket
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path

from zeroshard.comm.host import Process, fate_of
from zeroshard.core.files import write_for_this_user
from zeroshard.errors import UsageError
from zeroshard.run.recordings import (
    PRESENCE,
    STACKS,
    FlightRecording,
    read_recording,
    remove_recording,
)
from zeroshard.run.run_folder import make_run_folder, point_to, run_folder
from zeroshard.watchdog.stacks import ask

RANKS = "ranks.json"
KEPT = "recordings"
_END = "end.json"
_SUFFIX = ".gz"
_AHEAD = 4
"""Calls that a rank may begin ahead of the one that it waits in, for prefetching."""


@dataclass(frozen=True)
class Peer:
    """A rank, its process, and the path of its recording on its host."""

    rank: int
    process: Process
    recording: str

    def far(self) -> Peer:
        """The same rank, marked as one of which this host can see nothing."""
        return replace(self, process=replace(self.process, space=""))

    def fate(self, here: Process) -> tuple[str, str]:
        """What :func:`zeroshard.comm.host.fate_of` gives for its process."""
        return fate_of(self.process, here)

    def has_left(self, here: Process) -> bool:
        """Whether it closed its engine, or its process ended, as far as this host can tell."""
        if not self.is_on(here):
            return False
        return not self._of_engine().exists() or self.fate(here)[0] == "gone"

    def _of_engine(self) -> Path:
        """The recording that exists as long as the engine. Those of its groups are opened later."""
        path = Path(self.recording)
        return path.with_name(path.name.partition("-")[0])

    def is_on(self, here: Process) -> bool:
        """Whether this host sees the rank's process and files."""
        return bool(here.space) and self.process.space == here.space

    @property
    def stack_file(self) -> Path:
        """The file of its process for the stack that another one asks for."""
        return Path(self.recording).with_name(STACKS)

    def ask_for_stack(self, here: Process) -> str:
        """See :func:`~.stacks.ask`."""
        return ask(self.process, here, self.stack_file)

    def remove_files(self) -> None:
        """Remove its recording; with the file named :data:`PRESENCE`, remove the stack file too."""
        if Path(self.recording).name == PRESENCE:
            remove_recording(self.stack_file)
        remove_recording(Path(self.recording))


class Peers(Mapping[int, Peer]):
    """The ranks of a run: those of this host, and of every other rank only its host.

    ``near``: the ranks of this host, by global rank. ``runs``: first rank, last rank and host of ranks
    that follow each other, in order, as JSON; all ``ranks`` together. It is read when a rank of another
    host is first asked for, which few ranks of a run ever do.
    """

    def __init__(self, near: Mapping[int, Peer], ranks: Sequence[int], runs: str = "[]") -> None:
        self.near = near
        self._ranks = ranks
        self._text = runs

    @cached_property
    def _runs(self) -> list[tuple[int, int, str]]:
        return [(first, last, host) for first, last, host in json.loads(self._text)]

    def with_near(self, near: Mapping[int, Peer]) -> Peers:
        """The same ranks, of which some are known better: ``near``."""
        return Peers({**self.near, **near}, self._ranks, self._text)

    def __getitem__(self, rank: int) -> Peer:
        if (near := self.near.get(rank)) is not None:
            return near
        at = bisect_right(self._runs, rank, key=itemgetter(0)) - 1
        if at < 0 or rank > self._runs[at][1]:
            raise KeyError(rank)
        return Peer(rank, Process(self._runs[at][2], "", 0, ""), "")

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)


def remove_files(
    peers: Mapping[int, Peer], rank: int, here: Process, keep: Callable[[Peer], None]
) -> None:
    """Remove the files of ``rank``, which is this process.

    The last rank that leaves this host removes those of its dead ranks too, after ``keep(peer)``. Until
    then a rank that judges alone can read what the dead ranks did last. Each rank removes its own
    files first and then looks at those of the others. So if two leave at the same time, at least one of
    them sees that it is the last.
    """
    peers[rank].remove_files()
    others = [p for r, p in peers.items() if r != rank and p.is_on(here)]
    if all(peer.has_left(here) for peer in others):
        for peer in others:
            if Path(peer.recording).exists() and peer.fate(here)[0] == "gone":
                keep(peer)
            peer.remove_files()


@dataclass(frozen=True)
class StorePlace:
    """Where the store of a run is: ``kind`` is ``tcp``, ``file`` or a class that others cannot reach.

    ``space``: the end of the prefix of the watchdogs' keys.
    """

    kind: str
    host: str = ""
    port: int = 0
    path: str = ""
    space: str = ""


@dataclass(frozen=True)
class RanksFile:
    """``ranks.json``. ``peers``: by rank; the recording of each is its :data:`PRESENCE` file.

    ``calls``: what opened the sessions of this run, by the names of their recordings.
    """

    store: StorePlace
    attempt: int
    stacks: bool
    peers: Mapping[int, Peer]
    calls: Mapping[str, str]
    store_rank: int | None = None


def write_ranks(dump_dir: str | None, file: RanksFile) -> None:
    """Write ``ranks.json`` into this run's folder. Calls of earlier sessions of these processes stay."""
    with contextlib.suppress(OSError):
        folder = make_run_folder(dump_dir)
        calls = dict(file.calls)
        with contextlib.suppress(UsageError, OSError):
            before = read_ranks(folder)
            if before.peers == file.peers:
                calls = {**before.calls, **calls}
        found = {
            "format": 1,
            "store": asdict(file.store),
            "store_rank": file.store_rank,
            "attempt": file.attempt,
            "stacks": file.stacks,
            "calls": calls,
            "ranks": [asdict(peer) for _, peer in sorted(file.peers.items())],
        }
        draft = folder / f"{RANKS}.{os.getpid()}.tmp"
        write_for_this_user(draft, json.dumps(found))
        draft.replace(folder / RANKS)
        if dump_dir:
            point_to(folder, os.environ)


def read_ranks(folder: Path) -> RanksFile:
    """What :func:`write_ranks` wrote.

    Raises:
        OSError: there is none.
        UsageError: it is damaged, or of another release.
    """
    path = folder / RANKS
    try:
        found = json.loads(path.read_text())
        peers = {
            row["rank"]: Peer(row["rank"], Process(**row["process"]), row["recording"])
            for row in found["ranks"]
        }
        return RanksFile(
            StorePlace(**found["store"]),
            found["attempt"],
            found["stacks"],
            peers,
            found["calls"],
            found["store_rank"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read: {error!r}. It is damaged, or of another release of ZeroShard."
        ) from None


def keep_recordings(dump_dir: str | None, peer: Peer, reason: str, *, by: int) -> None:
    """Copy the recordings of ``peer`` to the run's folder. ``reason``: why it ended; "": it did not say.

    ``by``: the rank that copies.
    """
    source = Path(peer.recording).parent
    target = run_folder(dump_dir) / KEPT / f"rank-{peer.rank}-{peer.process.pid}"
    with contextlib.suppress(OSError):
        files = [file for file in source.iterdir() if not file.name.startswith(PRESENCE)]
        if not files:
            return
        make_run_folder(dump_dir)
        target.parent.mkdir(mode=0o700, exist_ok=True)
        target.mkdir(mode=0o700, exist_ok=True)
        for file in files:
            packed = gzip.compress(file.read_bytes(), 1)
            write_for_this_user(target / f"{file.name}{_SUFFIX}", packed)
        stack = _text_of(peer.stack_file)
        end = {
            "rank": peer.rank, "process": asdict(peer.process), "reason": reason, "by": by,
            "at": time.time(), "host": socket.gethostname(), "stack": stack,
        }  # fmt: skip
        write_for_this_user(target / _END, json.dumps(end))


@dataclass(frozen=True)
class KeptEnd:
    """How a rank ended, and its recordings by name; the first name is the newest session's.

    ``reason``: the error that ended it; "": it did not end by itself. ``at``: seconds since 1970, or 0.
    """

    peer: Peer
    reason: str
    at: float
    flights: Mapping[str, FlightRecording]


def read_kept(folder: Path, damaged: list[str]) -> list[KeptEnd]:
    """What :func:`keep_recordings` kept in a run's folder. ``damaged``: gets a line for each bad file."""
    found = []
    for end in sorted(folder.glob(f"{KEPT}/rank-*/{_END}")):
        try:
            row = json.loads(end.read_text())
            peer = Peer(row["rank"], Process(**row["process"]), str(end.parent / PRESENCE))
            flights = _read_all(sorted(end.parent.glob(f"*{_SUFFIX}")), damaged)
            found.append(KeptEnd(peer, row["reason"], row["at"], flights))
        except (OSError, ValueError, KeyError, TypeError) as error:
            damaged.append(f"{end}: {error}")
    return found


def read_left(peer: Peer, damaged: list[str]) -> KeptEnd | None:
    """What a process that was killed left in shared memory, if nobody has removed it."""
    source = Path(peer.recording).parent
    with contextlib.suppress(OSError):
        files = [file for file in sorted(source.iterdir()) if not file.name.startswith(PRESENCE)]
        if flights := _read_all(files, damaged):
            return KeptEnd(peer, "", 0.0, flights)
    return None


def _read_all(files: Sequence[Path], damaged: list[str]) -> dict[str, FlightRecording]:
    flights: dict[str, FlightRecording] = {}
    for file in files:
        flight = None
        try:
            raw = file.read_bytes()
            flight = read_recording(gzip.decompress(raw) if file.suffix == _SUFFIX else raw)
        except (OSError, EOFError, zlib.error) as error:  # a gzip file that is cut ends too early
            damaged.append(f"{file}: {error}")
            continue
        if flight is None:
            damaged.append(f"{file}: not a whole recording")
        else:
            flights[file.name.removesuffix(_SUFFIX)] = flight
    return flights


def _text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def newest_flight(flights: Mapping[str, FlightRecording]) -> FlightRecording | None:
    """The recording with the newest call, with the step of the session; None: there are none."""
    if not flights:
        return None
    newest = max(flights.values(), key=lambda each: each.records[-1].at_s if each.records else 0.0)
    return settled(newest._replace(step=max(each.step for each in flights.values())))


def settled(flight: FlightRecording | None) -> FlightRecording | None:
    """A recording of another process, without a word "waiting" that is too old.

    The watchdog writes it at its looks. If many calls followed, the rank waits there no more.
    """
    if flight is None or flight.seq - flight.waiting < _AHEAD:
        return flight
    return flight._replace(waiting=0)
