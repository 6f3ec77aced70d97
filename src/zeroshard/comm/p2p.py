"""Collectives of CPU ranks from tagged gloo sends and receives, without copies.

The tag of a message is a hash of the whole history of the group up to this collective (operation, name,
bytes, dtype). Messages of ranks that call different collectives therefore never match: the ranks wait,
and the watchdog names them (docs/decisions/0003-tagged-transport.md). Data moves from the sender's
buffer into the receiver's without a copy on either side.

W ranks; N padded elements, S = N // W; K elements of a small vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol, cast

import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.collectives import (
    DONE,
    ErrorExplainer,
    Handle,
    KeepsScratch,
    RecordedComm,
    Scratch,
    closed,
    first_line,
)
from zeroshard.comm.host import shut_down
from zeroshard.comm.recorder import TAG_BITS, Item, Recorder
from zeroshard.comm.store_keys import Store, namespace, ranks_key


class Links(Protocol):
    """The methods of a gloo group that are used here: messages between two ranks, matched by tag."""

    def size(self) -> int: ...
    def rank(self) -> int: ...
    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any: ...


def open_links(
    store: Store, ranks: Sequence[int], rank: int, *, label: str, timeout_s: float
) -> Links:
    """A full mesh of gloo connections between ``ranks``, which torch does not register as a group.

    Torch keeps the addresses of a destroyed group in the store, and a later group of the same name
    reads them and hangs. So each mesh gets a new key space. No rank returns before all are connected, so
    no rank closes a mesh to which another still connects.
    """
    me = ranks.index(rank)
    place = f"zs/links/{label}/{ranks_key(ranks)}"
    private: Any = namespace(store, place, me)
    timeout = timedelta(seconds=timeout_s)
    links = cast(Links, dist.ProcessGroupGloo(private, me, len(ranks), timeout))
    if private.add("connected", 1) == len(ranks):
        private.set("all", "connected")
    private.wait(["all"], timeout)
    return links


class P2PComm(KeepsScratch, RecordedComm):
    """Collectives from tagged sends and receives over gloo connections that only this object uses.

    ``ranks`` are the global ranks of the group in order. Every rank adds in that order; 16-bit sums
    accumulate in fp32 and are rounded once.
    """

    transport = "p2p"

    def __init__(
        self,
        links: Links,
        *,
        ranks: Sequence[int],
        recorder: Recorder | None = None,
        guard: ErrorExplainer | None = None,
        sockets: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(links.rank(), ranks, recorder, guard)
        # Start with the neighbour, so that not every rank talks to rank 0 first.
        self.peers = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._links: Links | None = links
        self._sockets = dict(sockets or {})

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Every other rank's slice is received into its place in ``full_N``."""
        item = self.recorder.all_gather(name, full_N, shard_S)
        if not full_N.numel():
            return DONE
        slices = full_N.view(self.size, -1).unbind()
        exchange = _Exchange(self, item).all(slices, [shard_S] * self.size)
        own = slices[self.rank]
        if own.data_ptr() != shard_S.data_ptr():
            own.copy_(shard_S)  # while the other slices are in flight
        return exchange

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Each pair of ranks exchanges chunks; ``wait`` adds them."""
        item = self.recorder.reduce_scatter(name, out_S, full_N)
        if not full_N.numel():
            return DONE
        shard_numel = out_S.numel()
        slices = full_N.view(self.size, shard_numel).unbind()
        space = self._scratch.take(full_N.dtype, (self.size - 1) * shard_numel)
        parts = [*space[: (self.size - 1) * shard_numel].view(-1, shard_numel).unbind()]
        parts.insert(self.rank, slices[self.rank])
        return self._summed(_Exchange(self, item).all(parts, slices), parts, out_S, space)

    def all_to_all(self, out_N: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Slice r of ``out_N`` gets the slice for this rank of rank r's ``full_N``."""
        item = self.recorder.all_to_all(name, full_N, full_N.numel() // self.size)
        if not full_N.numel():
            return DONE
        sent, received = full_N.view(self.size, -1), out_N.view(self.size, -1)
        received[self.rank].copy_(sent[self.rank])
        return _Exchange(self, item).all(received.unbind(), sent.unbind())

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """Sends one message to every rank. On a mismatch the tags differ, so the ranks wait."""
        vector = vector_K.detach().contiguous()
        item = self.recorder.gather_small(name, vector, self.size - 1)
        rows = vector.new_empty((self.size, vector.numel()))
        rows[self.rank] = vector
        if vector.numel():
            _Exchange(self, item).all(rows.unbind(), [vector] * self.size).wait()
        return rows

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The source sends to every rank."""
        item = self._record_broadcast(tensor, src, name)
        if not tensor.numel():
            return DONE
        flat = tensor.detach().view(-1)
        exchange = _Exchange(self, item)
        if src == self.rank:
            for peer in self.peers:
                exchange.send(flat, peer)
        else:
            exchange.receive(flat, src)
        return exchange

    def fail(self, item: Item, peer: int, error: RuntimeError) -> NoReturn:
        """Raise the exception that the guard gives for a broken link to ``peer``."""
        raise self._guard.explain(item, [self.ranks[peer]], first_line(error)) from None

    def links(self, item: Item) -> Links:
        """The connections.

        Raises:
            UsageError: this communicator was closed.
        """
        if self._links is None:
            raise closed(item[1])
        return self._links

    def abort(self) -> None:
        """Make every blocked wait fail now. Called by the watchdog's thread."""
        shut_down(self._sockets)

    def close(self) -> None:
        """Drop the connections; the last handle in flight closes the sockets."""
        self._links = None
        self._sockets = {}
        self._scratch = Scratch()
        self.recorder.close()


class _Exchange:
    """Sends and receives of one collective. Keeps every buffer alive until the wait."""

    __slots__ = ("_buffers", "_comm", "_item", "_links", "_tag", "_works")

    def __init__(self, comm: P2PComm, item: Item) -> None:
        self._comm = comm
        self._item = item
        self._tag = item[2] & TAG_BITS
        self._links = comm.links(item)
        self._works: list[tuple[int, Any]] = []
        self._buffers: list[Tensor] = []

    def all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> _Exchange:
        """Receive from all others and send to them; both by rank. Receives come first in the list."""
        for peer in self._comm.peers:
            self.receive(received[peer], peer)
        for peer in self._comm.peers:
            self.send(sent[peer], peer)
        return self

    def send(self, tensor: Tensor, peer: int) -> None:
        self._start(self._links.send, tensor, peer)

    def receive(self, tensor: Tensor, peer: int) -> None:
        self._start(self._links.recv, tensor, peer)

    def _start(self, call: Callable[..., Any], tensor: Tensor, peer: int) -> None:
        try:
            self._works.append((peer, call([tensor], peer, self._tag)))
        except RuntimeError as error:
            self._comm.fail(self._item, peer, error)
        self._buffers.append(tensor)

    def wait(self) -> None:
        works, self._works = self._works, []
        if not works:
            return
        # Not in slices of time: the first timeout of a send or receive closes the pair.
        began_s = self._comm.recorder.begin_wait(self._item)
        peer = -1
        try:
            for peer, work in works:  # noqa: B007  (the peer of the failing one is reported)
                work.wait()
        except RuntimeError as error:
            self._comm.fail(self._item, peer, error)
        finally:
            self._comm.recorder.end_wait(self._item, began_s)
        self._buffers = []
