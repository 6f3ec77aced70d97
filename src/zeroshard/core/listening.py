"""Listening sockets of one interface: a store of torch listens on all of them if it opens its own."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int) -> socket.socket | None:
    """A socket that listens on the interface of ``host`` alone.

    None: ``host`` is no address of this machine, or ``port`` is in use. ``port`` 0: any free one.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError:
        return None
