"""Reads the state of the processes and sockets of this host from ``/proc``.

Where there is no ``/proc``, the functions report "unknown" or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process. ``started`` distinguishes it from a later one with the same number."""

    host: str
    space: str  # boot and process namespace: within one, process numbers can be compared
    pid: int
    started: str


def this_process() -> Process:
    """The calling process."""
    return Process(socket.gethostname(), _space(), os.getpid(), _stat(os.getpid())[1])


def host_number() -> int:
    """A number that identifies this host; 52 bits, so that float64 holds it exactly."""
    boot = _space().partition(" ")[0]
    digest = hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12


def fate_of(process: Process, here: Process) -> tuple[str, str]:
    """``runs``, ``waits``, ``stopped`` or ``gone``, and why in words.

    ``waits``: for a disk, at this moment. Any process that reads a file may do so for an instant.
    ``unknown`` for a process of another host.
    """
    if process.space != here.space or not process.space:
        return "unknown", ""
    state, started = _stat(process.pid)
    if state in ("", "Z", "X") or started != process.started:
        return "gone", f"process {process.pid} ended"
    if state in ("T", "t"):
        return "stopped", f"process {process.pid} is stopped by a signal (state {state})"
    if state == "D":
        return "waits", f"process {process.pid} waits for a disk (state D)"
    return "runs", ""


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for signal ``number``; False if that is not known."""
    with contextlib.suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def times_run(process: Process, here: Process) -> int:
    """How often the main thread of a process has been put on a core or taken off; 0 if not known.

    It does not change while a signal has stopped the process.
    """
    with contextlib.suppress(OSError, ValueError):
        if process.space == here.space and process.space:
            lines = (_PROC / str(process.pid) / "status").read_text().splitlines()
            return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return 0


def sibling_ranks() -> dict[int, int]:
    """Global rank -> process number of the ranks that run below this process's parent, a launcher.

    A rank is known by the variable ``RANK`` with which it was started. Empty if the parent has that
    variable itself, since it is a script around this rank alone then; and if the variables of a child
    cannot be read, since it may be any rank: programs that rename their process overwrite them.
    """
    parent = os.getppid()
    if "RANK" in _variables(parent):
        return {}
    found = {}
    with contextlib.suppress(OSError, ValueError):
        for children in (_PROC / str(parent) / "task").glob("*/children"):
            for pid in map(int, children.read_text().split()):
                variables = _variables(pid)
                if "RANK" in variables:
                    found[int(variables["RANK"])] = pid
                elif "PATH" not in variables and _stat(pid)[0] not in ("", "Z", "X"):
                    return {}
    return found


def _variables(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty if it has ended or cannot be read."""
    with contextlib.suppress(OSError):
        text = (_PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
        return {name: value for name, _, value in (e.partition("=") for e in text.split("\0"))}
    return {}


def open_sockets() -> dict[int, str]:
    """Descriptor -> identity of every socket that this process has open."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC / "self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(_PROC / "self/fd" / entry)
                if target.startswith("socket:"):
                    found[int(entry)] = target
    return found


def new_sockets(before: Mapping[int, str]) -> dict[int, str]:
    """The sockets that were opened since ``before``: those of the connections just made."""
    return {fd: what for fd, what in open_sockets().items() if before.get(fd) != what}


def shut_down(sockets: Mapping[int, str]) -> int:
    """Shut down the connections that still have the given identity; return how many. Wakes their waiters.

    Listening sockets are left alone, because gloo aborts the process when its accept fails.
    """
    present = open_sockets()
    ended = 0
    for descriptor, identity in sockets.items():
        if present.get(descriptor) == identity:
            # The descriptor stays open; its owner closes it when it sees the end of the stream.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
                if not twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    twin.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def hung_up(sockets: Mapping[int, str], port: int | None) -> bool:
    """Whether the peer of one of these connections, with the remote ``port``, has closed it.

    Nothing is consumed: bytes that have arrived can still be read.
    """
    for descriptor, identity in sockets.items():
        with contextlib.suppress(OSError):
            if os.readlink(_PROC / "self/fd" / str(descriptor)) != identity:
                continue
            with socket.socket(fileno=os.dup(descriptor)) as twin:
                if twin.getpeername()[1] != port:
                    continue
                try:
                    if not twin.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        return True
                except BlockingIOError:
                    continue
                except ConnectionError:
                    return True
    return False


def _space() -> str:
    with contextlib.suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    return ""


def _stat(pid: int) -> tuple[str, str]:
    """State letter and start time of a process; empty if there is none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return "", ""
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and parentheses
    return fields[0], fields[19]
