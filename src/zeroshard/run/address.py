"""The address and the port at which the ranks of a run meet, and sockets that listen.

A store of torch that opens its own socket listens on all interfaces. Those of this file listen on one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from pathlib import Path
from random import SystemRandom

from zeroshard.errors import LaunchError

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_RANGE = "32768 60999"
_TRIES = 100


def check_address(host: str, port: int | None) -> None:
    """Check that there is such a host. A name server that does not answer is not waited for here.

    Raises:
        LaunchError: there is not.
    """
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno not in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", None)):
            return
        raise LaunchError(
            f"the ranks meet at host {host!r}, port {port}, and this name has no address "
            f"({error.strerror}). Give a name or an address of rank 0's host that all hosts can reach: "
            "to the launchers as --master_addr, to ranks without one as MASTER_ADDR."
        ) from None


def unused_port(address: str = "127.0.0.1") -> int:
    """A port that nothing listens on, for a process that will bind it a little later.

    It is not one that the system gives to connections (``ip_local_port_range``): between this call and
    the other process any connection of this host could get such a port.
    """
    known = _RANGE.read_text() if _RANGE.exists() else _USUAL_RANGE
    end = int(known.split()[0])
    own = range(_FIRST, end) if end > 2 * _FIRST else range(_FIRST, 2**16)
    for _ in range(_TRIES):
        port = SystemRandom().choice(own)
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
        return port
    raise LaunchError(
        f"none of {_TRIES} ports between {own[0]} and {own[-1]} can be used on {address or 'this host'}, "
        "and the ranks would meet at one. Give one that is free with --master_port."
    )


_BACKLOG = 2048
_LISTENS = "0A"  # the state in /proc/net/tcp


def listening_socket(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the interface of ``host`` alone.

    None: ``host`` is no address of this machine, or ``port`` is in use. ``port`` 0: any free one.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError:
        return None


def interface_socket(host: str, port: int) -> socket.socket | None:
    """A socket that listens where other machines find ``host``, this machine. None: ``port`` is in use.

    It listens on the interface of ``host``, but on all interfaces where others may know that by another
    address: if the name has several or, as on Debian, 127.0.1.1, and if this machine does not have the
    address itself.
    """
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        places = {(family, str(address[0])) for family, *_, address in found}
        ((family, address), *others) = places
        if not others and (address == host or not ipaddress.ip_address(address).is_loopback):
            try:
                return socket.create_server((address, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    return None
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=_BACKLOG
        )
    except OSError:
        return None


def gloo_on_loopback() -> dict[str, str]:
    """The variable that lets gloo listen on the loopback interface; empty where that has another name.

    Without it gloo looks up the host's name, which takes seconds on some machines, and takes the
    interface that has that address.
    """
    return {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}


def listening_addresses(pid: int | None = None) -> list[str]:
    """The addresses that a process listens on, each once; ``0.0.0.0`` and ``::`` are all interfaces.

    ``pid``: None: this process. Empty where there is no ``/proc``, and for processes of other users.
    """
    proc = Path("/proc") / ("self" if pid is None else str(pid))
    opened: set[str] = set()
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for fd in (proc / "fd").iterdir():
            with contextlib.suppress(OSError):
                opened.add(os.readlink(fd))
        for table in ("tcp", "tcp6"):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and f"socket:[{rest[5]}]" in opened:
                    found.add(_address(local.partition(":")[0]))
    return sorted(found)


def _address(words: str) -> str:
    """An address from its 32-bit words in hexadecimal, each in the order of bytes of this machine.

    >>> _address("0100007F")
    '127.0.0.1'
    """
    raw = bytes.fromhex(words)
    ordered = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    found = ipaddress.ip_address(ordered)
    return str(getattr(found, "ipv4_mapped", None) or found)
