"""What the launcher and its ranks open to the network."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from support.covering import sampled
from warm_python import run

from zeroshard.run.address import interface_socket, listening_addresses, listening_socket

LAUNCH = [sys.executable, "-m", "zeroshard.cli.main", "launch"]

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
from torch.distributed import TCPStore
import zeroshard
from zeroshard.run.address import listening_addresses

if sys.argv[2] == "ours":
    zeroshard.init_distributed()
else:
    dist.init_process_group("gloo")
dist.barrier()
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
found = {
    "launcher": listening_addresses(os.getppid()),
    "rank": listening_addresses(),
    "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
    "keys": store.list_keys() if hasattr(store, "list_keys") else [],
}
Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""
LOOPBACK = {"127.0.0.1", "::1"}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("joins", sampled(["ours", "torch"], every=2))
def test_the_store_of_one_host_is_on_its_loopback_and_holds_no_pickle(tmp_path, joins):
    (tmp_path / "script.py").write_text(PROGRAM)
    env = {k: value for k, value in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    words = [*LAUNCH, "--nproc", "2", "script.py", str(tmp_path), joins]
    done = run(words, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert len(found[0]["launcher"]) == 1
    for rank in found:
        assert {*rank["launcher"], *rank["rank"]} <= LOOPBACK
        assert rank["gloo"] == "lo" or not Path("/sys/class/net/lo").exists()
        assert not [key for key in rank["keys"] if "torch.rendezvous" in key]


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_addresses_that_a_process_listens_on_are_found(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    before = listening_addresses()
    try:
        opened = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with opened:
        assert set(listening_addresses()) == {*before, address}
        assert set(listening_addresses(os.getpid())) == {*before, address}
    assert listening_addresses() == before


def test_a_socket_listens_on_one_interface_and_only_where_it_can():
    with listening_socket("127.0.0.1", 0) as opened:
        address, port = opened.getsockname()
        assert address == "127.0.0.1"
        assert listening_socket("127.0.0.1", port) is None
    assert listening_socket("192.0.2.1", 0) is None  # an address for documentation
    assert listening_socket("no.such.name.invalid", 0) is None


@pytest.mark.parametrize(
    ("host", "known_here", "where"),
    [
        ("127.0.0.2", ["127.0.0.2"], "127.0.0.2"),
        ("node1", ["127.0.1.1"], "all"),
        ("node1", ["127.0.0.2", "127.0.0.3"], "all"),
        ("node1", ["192.0.2.1"], "all"),
        ("192.0.2.1", ["192.0.2.1"], "all"),
        ("node1", [], "all"),
    ],
    ids=["address", "Debian", "several", "elsewhere", "translated address", "unknown"],
)
def test_other_hosts_reach_the_socket_that_listens_for_them(monkeypatch, host, known_here, where):
    def known(name, port, **_):
        if not known_here:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in known_here]

    monkeypatch.setattr(socket, "getaddrinfo", known)
    with interface_socket(host, 0) as opened:
        address, port = opened.getsockname()[:2]
        assert address in (("::", "0.0.0.0") if where == "all" else (where,))
        assert interface_socket(host, port) is None  # the port is in use
        monkeypatch.undo()
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
