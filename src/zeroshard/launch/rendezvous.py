"""Where the ranks of one host meet: a store that only this host reaches.

Torch's rendezvous for one host ("c10d") keeps its state as a pickle in a store that listens on all
interfaces: whoever connects can run code in the launcher. Here nothing that arrives is unpickled, and
nothing listens beyond the given address.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from zeroshard.core.listening import listening_socket
from zeroshard.errors import LaunchError

_TIMEOUT = timedelta(seconds=900)


class OneHostRendezvous(RendezvousHandler):
    """The rendezvous of a single agent. Its store is the one that the ranks use."""

    def __init__(self, run_id: str, address: str, port: int = 0) -> None:
        """``address``: the name or number of an interface of this host. ``port`` 0: any free one."""
        self._run_id = run_id
        self._address = address
        self._port = port
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """A name for torch's log."""
        return "one-host"

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this store; otherwise rank 0 would open another."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store.

        Raises:
            LaunchError: this host does not have the address, or the port is in use.
        """
        if self._store is None:
            opened = listening_socket(self._address, self._port)
            if opened is None:
                raise LaunchError(
                    f"nothing can listen on {self._address}:{self._port}, where the ranks of this host "
                    "would meet: this host does not have that address, or the port is in use. Leave out "
                    "--master_addr and --master_port for ranks of one host."
                )
            port = opened.getsockname()[1]
            self._store = TCPStore(
                self._address, port, is_master=True, wait_for_workers=False, timeout=_TIMEOUT,
                master_listen_fd=opened.detach(),
            )  # fmt: skip
        store: Store = self._store
        place = RendezvousStoreInfo(self._address, self._store.port)
        return RendezvousInfo(store, 0, 1, place)

    def is_closed(self) -> bool:
        """Never: each attempt has a rendezvous of its own."""
        return False

    def set_closed(self) -> None:
        """Nothing to tell: there is no other agent."""

    def num_nodes_waiting(self) -> int:
        """None: there is no other agent."""
        return 0

    def get_run_id(self) -> str:
        """The name that was given."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store once nobody uses it."""
        self._store = None
        return True
