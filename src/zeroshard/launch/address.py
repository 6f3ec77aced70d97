"""Checks the address at which the ranks of a run meet."""

from __future__ import annotations

import socket

from zeroshard.errors import LaunchError


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
            f"({error.strerror}). Set MASTER_ADDR, or --master_addr, to a name or an address of rank 0's "
            "host that all hosts can reach."
        ) from None
