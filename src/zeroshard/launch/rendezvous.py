"""Tells torch's agent which store the launchers of a run share, and which of them this one is."""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from zeroshard.launch.common_store import CommonStore


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
