"""Which processes and sockets are behind the ranks of this host?

The only reader of ``/proc``. Where there is none, nothing is known and nothing is claimed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number."""

    host: str
    space: str  # boot and process namespace: within one, process numbers can be compared
    pid: int
    started: str

    def to_json(self) -> dict[str, object]:
        """For the store."""
        return asdict(self)


def this_process() -> Process:
    """The process that runs this."""
    return Process(socket.gethostname(), _space(), os.getpid(), _stat(os.getpid())[1])


def host_number() -> int:
    """The same for all processes of a host, another for each host; 52 bits, so that a float holds it."""
    boot = _space().partition(" ")[0]
    digest = hashlib.sha256(f"{socket.gethostname()} {boot}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 12


def fate_of(process: Process, here: Process) -> tuple[str, str]:
    """``runs``, ``gone`` or ``stopped``, and the same in words; ``unknown`` on another host."""
    if process.space != here.space or not process.space:
        return "unknown", ""
    state, started = _stat(process.pid)
    if state in ("", "Z", "X") or started != process.started:
        return "gone", f"process {process.pid} ended"
    if state in ("T", "t"):
        return "stopped", f"process {process.pid} is stopped by a signal (state {state})"
    if state == "D":
        return "stopped", f"process {process.pid} waits for a disk (state D)"
    return "runs", ""


def open_sockets() -> dict[int, str]:
    """Descriptor -> identity of every socket this process has open."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_PROC / "self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(_PROC / "self/fd" / entry)
                if target.startswith("socket:"):
                    found[int(entry)] = target
    return found


def shut_down(sockets: Mapping[int, str]) -> int:
    """End the traffic on those connections that are still the same; wakes whoever waits for them.

    Listening sockets are left alone: gloo aborts the process when its accept fails.
    """
    present = open_sockets()
    ended = 0
    for descriptor, identity in sockets.items():
        if present.get(descriptor) == identity:
            # The descriptor stays open: its owner closes it when it sees the end.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as twin:
                if not twin.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    twin.shutdown(socket.SHUT_RDWR)
                    ended += 1
    return ended


def hung_up(sockets: Mapping[int, str], port: int | None) -> bool:
    """Whether the other end of one of these connections, at ``port`` there, has closed it.

    Only looks: what has arrived stays where it is.
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
