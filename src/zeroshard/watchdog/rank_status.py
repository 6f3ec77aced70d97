"""Finds out the status of a rank: from its own answer, or from what its host shows of it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import sysconfig
import threading
import traceback
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from zeroshard.comm.flight_recorder import FlightRecording, Record
from zeroshard.comm.host import Process, fate_of
from zeroshard.comm.recorder import (
    PRESENCE,
    read_recording_file,
    remove_recording,
)
from zeroshard.errors import CLOSED
from zeroshard.run.recordings import STACKS
from zeroshard.watchdog.findings import TORCH, RankStatus, Wait
from zeroshard.watchdog.silent_stack import ask, innermost

_FRAMES = 8
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Prefixes of the files whose frames are not the program's. They are absolute, since a program may be in
#: a folder of any name.
OWN_FILES = (
    *(
        _PACKAGE + part + os.sep
        for part in (
            "run", "comm", "watchdog", "session", "metrics", "device", "memory", "offload", "optim",
            "precision", "zero", "checkpoint", "experts", "parallel", "sequence", "data", "engine",
            "deepspeed", "integrations",
        )
    ),
    _TORCH, threading.__file__, contextlib.__file__,
)  # fmt: skip
#: Files of ZeroShard that call ``torch.distributed``.
_COLLECTIVES = (
    _PACKAGE + "comm" + os.sep,
    _PACKAGE + "watchdog" + os.sep,
    _PACKAGE + "session" + os.sep,
    _PACKAGE + os.path.join("deepspeed", "collectives.py"),
)
#: Where the program's thread waits while torch computes gradients of tensors on a device.
_BACKWARD = (os.path.join(_TORCH, "autograd", "graph.py"), "_engine_run_backward")
_LIBRARIES = (
    _PACKAGE,
    "<frozen ",
    *(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
)
#: (file, function; "" is any function) -> what the program does in it.
_PHASES = {
    (_PACKAGE + os.path.join("zero", "init.py"), ""): "zero.Init",
    (_PACKAGE + os.path.join("zero", "access.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "gathered.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "sharded_parameter.py"), ""): "access",
    (_PACKAGE + os.path.join("zero", "hooks.py"), ""): "forward",
    (_PACKAGE + os.path.join("engine", "build.py"), ""): "initialize",
    (_PACKAGE + os.path.join("engine", "optimizer_step.py"), ""): "step",
    (_PACKAGE + os.path.join("engine", "export.py"), ""): "export",
    **{
        (_PACKAGE + os.path.join("engine", file), function): phase
        for file in ("engine.py", "training_engine.py", "engine_base.py")
        for function, phase in {
            "forward": "forward",
            "backward": "backward",
            "step": "step",
            "save_checkpoint": "save",
            "wait_for_checkpoint": "save",
            "load_checkpoint": "load",
            "close": "close",
        }.items()
    },
    (_TORCH + os.path.join("autograd", "__init__.py"), ""): "backward",
}
_OF_ANYBODY = {
    "generate": "generate",
    "from_pretrained": "from_pretrained",
    "save_pretrained": "export",
    "save_state": "save",
    "load_state": "load",
}
_CALLS_OF_TORCH = _TORCH + os.path.join("distributed", "distributed_c10d.py")
_WAIT_OF_TORCH = (_TORCH + os.path.join("distributed", "_functional_collectives.py"), "wait_tensor")
"""Where the host waits for a collective of a DTensor."""
_BLOCKING = (_CALLS_OF_TORCH, _WAIT_OF_TORCH[0], _TORCH + "_ops.py")
"""Files of the innermost frame in such a call."""


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
        """See :func:`~.silent_stack.ask`."""
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


def status_from_answer(peer: Peer, answer: Mapping[str, Any]) -> RankStatus:
    """The status of a rank from its own answer."""
    left = answer["left"]
    return RankStatus(
        rank=peer.rank,
        flight=_flight_of(answer["flight"]),
        fate="runs" if left is None else "left",
        detail="" if left is None else f"left: {left}",
        blocked_s=answer["blocked_s"],
        stack=answer["stack"],
        stacks=answer["stacks"],
        host=peer.process.host,
        phase=answer["phase"],
        failed=answer["failed"],
        wait=_wait_of(answer["wait"]),
        reached=answer["reached"],
    )


def status_of_values(values: Mapping[str, Any]) -> RankStatus:
    """The status that was written as JSON into the evidence of a diagnosis."""
    return RankStatus(
        **{**values, "flight": _flight_of(values["flight"]), "wait": _wait_of(values["wait"])}
    )


def _flight_of(fields: Sequence[Any] | None) -> FlightRecording | None:
    if not fields:
        return None
    flight = FlightRecording(*fields)
    return flight._replace(records=tuple(Record(*record) for record in flight.records))


def _wait_of(fields: Sequence[Any] | None) -> Wait | None:
    """The wait in an answer. JSON has no tuples, and equal waits must compare equal."""
    if not fields:
        return None
    wait = Wait(*fields)
    return wait._replace(members=tuple(wait.members))


def status_from_host(peer: Peer, here: Process, *, asked: bool = True) -> RankStatus:
    """The status of a rank that does not answer, or was not ``asked``, from what this host knows."""
    fate, detail = peer.fate(here)
    if fate in ("runs", "waits") and peer.has_left(here):
        fate, detail = "left", CLOSED
    if fate == "waits" and not asked:  # seen once: it may run the next moment
        fate, detail = "runs", ""
    flight = read_recording_file(Path(peer.recording)) if fate != "unknown" else None
    if fate == "unknown" or (fate == "runs" and asked):
        known = "" if flight is None else "its process runs but "
        fate, detail = "silent", f"{known}does not answer"
    return RankStatus(
        rank=peer.rank,
        flight=flight,
        fate=fate,
        detail=detail,
        answered=False,
        host=peer.process.host,
    )


def with_stack(status: RankStatus, peer: Peer, here: Process) -> RankStatus:
    """The status, with the stack of a process of this host that runs but does not answer."""
    if status.fate != "silent":
        return status
    stack = innermost(peer.ask_for_stack(here))
    return replace(status, stack=stack, detail=f"{status.detail} (in {stack})") if stack else status


def without_connection(status: RankStatus) -> RankStatus:
    """The status of a rank whose connection broke: if it runs and does not wait, it closed its end."""
    if status.fate == "silent":
        return replace(status, fate="gone", detail="its connection closed; it does not answer")
    if status.fate == "runs" and not (status.flight and status.flight.waiting):
        return replace(status, fate="left", detail="it closed its end of the connection")
    return status


def stack_line(thread: int) -> str:
    """Where a thread is, on one line, innermost first: the line that called ZeroShard or torch, which may
    be a library's, and the program's lines that led to it.

    ``accelerator.py:3021 save_state < train.py:88 save < train.py:120 main``
    """
    frames = list(_frames(thread))
    theirs = [f for f in frames if not f.f_code.co_filename.startswith(OWN_FILES)] or frames
    shown = theirs[:1] + [f for f in theirs[1:] if not f.f_code.co_filename.startswith(_LIBRARIES)]
    return " < ".join(
        f"{Path(f.f_code.co_filename).name}:{f.f_lineno} {f.f_code.co_name}"
        for f in shown[:_FRAMES]
    )


def phase(thread: int) -> str:
    """What the program does with ZeroShard in ``thread``: its outermost call with a name; "" if none."""
    found = ""
    for frame in _frames(thread):
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        own = _PHASES.get((file, function)) or _PHASES.get((file, ""))
        if own is None and not file.startswith(OWN_FILES):
            own = _OF_ANYBODY.get(function)
        found = own or found
    return found


def call_of_torch(thread: int) -> tuple[FrameType, str] | None:
    """The frame and name of the call of ``torch.distributed`` that the program itself is in, if any."""
    frames = _frames(thread)
    innermost = frame = next(frames, None)
    if innermost is None or innermost.f_code.co_filename not in _BLOCKING:
        return None
    name = ""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        code = frame.f_code
        if (
            code.co_filename == _CALLS_OF_TORCH
            or (code.co_filename, code.co_name) == _WAIT_OF_TORCH
        ):
            name = code.co_name
        frame = next(frames, None)
    if not name:  # some operation of torch
        return None
    ours = frame is not None and frame.f_code.co_filename.startswith(_COLLECTIVES)
    return None if ours else (innermost, f"{TORCH}.{name}")


def _frames(thread: int) -> Iterator[FrameType]:
    """The frames of a thread, innermost first.

    During a backward on a device, torch runs hooks on a thread of its own while the program's thread
    waits for it. The frames of such hooks come first.
    """
    first: list[FrameType] = []
    current = sys._current_frames()
    frame = current.get(thread)
    if frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD:
        named = {t.ident for t in threading.enumerate() if type(t) is not threading._DummyThread}
        first = [current[ident] for ident in sorted(current.keys() - named)]
    # One of these frames is this one. A reference to it would keep the locals of all threads alive until
    # the garbage collector runs.
    del current
    for hook in first:
        yield from _outwards(hook)
    yield from _outwards(frame)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def stack_of(thread: int) -> str:
    """The whole stack of a thread, the innermost frame last; "" if there is no such thread."""
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""


def stacks(last: int | None = _FRAMES) -> str:
    """The stacks of all threads of this process. ``last``: so many innermost frames; None: all."""
    names = {t.ident: t.name for t in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        lines = traceback.format_stack(frame)[-(last or 0) :]
        name = names.get(ident, f"thread {ident} of torch")
        parts.append(f"{name}:\n{''.join(lines)}")
    return "\n".join(parts)
