"""Where rank 0 serves the store that ranks meet through, if no launcher serves it."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from zeroshard.comm.env import RankInfo
from zeroshard.watchdog import join


@pytest.mark.parametrize(
    ("name", "local", "where"),
    [("localhost", 2, "127.0.0.1"), ("127.0.0.1", 1, "127.0.0.1"), ("localhost", 1, "all")],
    ids=["one host", "an address", "a name that means this host"],
)
def test_the_store_keeps_to_the_interface_of_its_address(monkeypatch, name, local, where):
    """The name of a host may mean 127.0.1.1 on that host: others could not connect there."""
    opened = []

    def store(host, port, world_size, serves, timeout, *, master_listen_fd=None, **options):
        if master_listen_fd is not None:
            with socket.socket(fileno=master_listen_fd) as listening:
                opened.append(listening.getsockname()[0])

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(join, "TCPStore", store)
    monkeypatch.setattr(join, "launcher_serves_store", lambda: False)
    method = f"tcp://{name}:{port}"
    join._store(method, RankInfo(0, 2, 0, local, "torchrun"), timedelta(seconds=5))
    assert opened == [where] or (where == "all" and opened[0] in ("::", "0.0.0.0"))
