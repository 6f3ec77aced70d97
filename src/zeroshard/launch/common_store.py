"""The store that the launchers and ranks of a run meet through. It listens on a loopback interface.

Torch's own ways to meet are not used. Its rendezvous for one host ("c10d") keeps its state as a pickle in
a store that listens on all interfaces: whoever connects can run code in the launcher. That for several
hosts ("static") lets whoever connects read and write every key.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,  # type: ignore[attr-defined]
)
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from zeroshard.errors import LaunchError
from zeroshard.launch import relay
from zeroshard.run.address import interface_socket, listening_socket

LOOPBACK = "127.0.0.1"
_TIMEOUT = timedelta(seconds=900)


@dataclass(frozen=True)
class CommonStore:
    """A store, and where the ranks of this host find it."""

    store: TCPStore
    address: str
    port: int


@dataclass(frozen=True)
class HostsPlace:
    """Where the hosts of a run meet: ``port`` of the first host. Clients show that they know ``secret``.

    ``is_first``: this is the first host, which has the store.
    """

    address: str
    port: int
    secret: str
    is_first: bool


def store_of_one_host(address: str, port: int = 0) -> CommonStore:
    """A store on an interface of this host. ``port`` 0: any free one.

    Raises:
        LaunchError: this host does not have the address, or the port is in use.
    """
    opened = listening_socket(address, port)
    if opened is None:
        raise LaunchError(
            f"nothing can listen on {address}:{port}, where the ranks of this host would meet: this host "
            "does not have that address, or the port is in use. Leave out --master_addr and "
            "--master_port for ranks of one host."
        )
    port = opened.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
        master_listen_fd=opened.detach(),
    )  # fmt: skip
    return CommonStore(store, address, port)


@contextmanager
def store_of_hosts(place: HostsPlace, *, await_hosts: int = 1) -> Iterator[CommonStore]:
    """A context with the store of all hosts, as this host sees it.

    ``await_hosts``: returns when so many are there.

    Raises:
        LaunchError: the port is in use, or the first host does not answer or has another secret.
    """
    opened = listening_socket(LOOPBACK, 0)
    assert opened is not None, "a free port of the loopback interface"
    port = opened.getsockname()[1]
    if place.is_first:
        outside = interface_socket(place.address, place.port)
        if outside is None:
            raise LaunchError(
                f"port {place.port} cannot be used on this host, and the ranks would meet there. Give "
                "another one with --master_port, or end the program that uses it."
            )
        command = ["store", str(outside.fileno()), LOOPBACK, str(port)]
    else:
        outside = opened
        command = ["ranks", str(opened.fileno()), place.address, str(place.port)]
    with outside:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(relay.__file__)), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[outside.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )
    try:
        _await_ready(process, place.secret)
        store = TCPStore(
            LOOPBACK, port, await_hosts, place.is_first, _TIMEOUT, wait_for_workers=await_hosts > 1,
            master_listen_fd=opened.detach() if place.is_first else None,
        )  # fmt: skip
        yield CommonStore(store, LOOPBACK, port)
    finally:
        opened.close()
        _end(process)


def client_of(common: CommonStore, timeout_s: float) -> TCPStore:
    """Another connection to a store, for another thread."""
    return TCPStore(
        common.address, common.port, is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )  # fmt: skip


def _await_ready(process: subprocess.Popen[bytes], secret: str) -> None:
    """Hand the secret to the relay, and wait until it forwards connections."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):  # it has ended, and said why
        process.stdin.write(secret.encode().hex().encode() + b"\n")
        process.stdin.flush()
    said = process.stdout.readline().decode(errors="replace").strip()
    if said != relay.READY:
        raise LaunchError(said or "the relay that connects this host to the others did not start.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the relay: it ends with its standard input."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class StoreRendezvous(RendezvousHandler):
    """The rendezvous of launcher ``node_rank`` of ``num_nodes``. Ranks use the same store as launchers.

    ``run_id`` keeps the launchers' keys apart from those of another attempt.
    """

    def __init__(self, run_id: str, common: CommonStore, node_rank: int, num_nodes: int) -> None:
        self._run_id = run_id
        self._common = common
        self._node_rank, self._num_nodes = node_rank, num_nodes

    def get_backend(self) -> str:
        """A name for torch's log."""
        return "store"

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this store; otherwise rank 0 would open another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """The store, and where the ranks of this host find it."""
        store: Store = PrefixStore(self._run_id, self._common.store)
        place = RendezvousStoreInfo(self._common.address, self._common.port)
        return RendezvousInfo(store, self._node_rank, self._num_nodes, place)

    def is_closed(self) -> bool:
        """Never: each attempt has a rendezvous of its own."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell: the ranks of an attempt are fixed."""

    def num_nodes_waiting(self) -> int:
        """None: the ranks of an attempt are fixed."""
        return 0

    def get_run_id(self) -> str:
        """The name that was given."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to close: the launcher closes the store."""
        return True
