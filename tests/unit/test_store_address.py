"""Where rank 0 serves the store that ranks meet through, if no launcher serves it."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest

from zeroshard.comm.env import RankInfo
from zeroshard.errors import LaunchError
from zeroshard.run import address
from zeroshard.run.address import unused_port
from zeroshard.session import join


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

    port = unused_port()
    monkeypatch.setattr(join, "TCPStore", store)
    monkeypatch.setattr(join, "launcher_serves_store", lambda: False)
    method = f"tcp://{name}:{port}"
    join._store(method, RankInfo(0, 2, 0, local, "torchrun"), timedelta(seconds=5))
    assert opened == [where] or (where == "all" and opened[0] in ("::", "0.0.0.0"))


def test_a_port_is_none_of_those_that_connections_get_and_none_in_use(monkeypatch):
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(10_000 <= unused_port() < first for _ in range(50))
    with socket.socket() as held:
        held.bind(("127.0.0.1", unused_port()))
        wanted = [held.getsockname()[1], unused_port()]
        monkeypatch.setattr(
            address, "SystemRandom", lambda: mock.Mock(choice=lambda _: wanted.pop(0))
        )
        free = wanted[1]
        assert unused_port() == free
        wanted += [held.getsockname()[1]] * 200
        with pytest.raises(LaunchError, match="Give one that is free with --master_port"):
            unused_port()
