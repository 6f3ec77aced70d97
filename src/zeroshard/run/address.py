"""The address and the port at which the ranks of a run meet."""

from __future__ import annotations

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
