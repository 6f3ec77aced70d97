"""Messages from one rank to another one of the same host, through memory that both can read.

A message costs a copy on each side, and a call that wakes the receiver if it sleeps. A message through
gloo costs several times as much: a thread of each rank reads and writes sockets.

The sender copies a message into a block of its own memory when it starts to send, and does not wait for
the receiver. A block is used again when its message was read, so there are as many blocks as messages
were ever on their way at once. Numbers, tags and blocks are those of [Note: collectives in shared memory]
in :mod:`zeroshard.comm.shm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroshard.comm.collectives import ErrorExplainer, NoExplainer
from zeroshard.comm.peer_memory import PeerMemory
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shm_ring import NOWHERE, Pending, Ring


class ShmLink:
    """All messages from one rank to another one. Both ranks have one, and call it in the same order.

    ``ranks``: the sender and the receiver, as global ranks. ``rank``: 0 for the sender, 1 for the
    receiver.
    """

    def __init__(
        self,
        meeting: PeerMemory,
        *,
        rank: int,
        ranks: Sequence[int],
        recorder: Recorder,
        guard: ErrorExplainer | None,
        timeout_s: float,
    ) -> None:
        self._ring = Ring(
            meeting, rank=rank, ranks=ranks, recorder=recorder, guard=guard or NoExplainer(),
            timeout_s=timeout_s,
        )  # fmt: skip

    def send(self, item: Item, tensor: Tensor) -> Sent:
        """Start to send. The caller may write its tensor afterwards."""
        ring = self._ring
        seq = ring.begin(item)
        if tensor.numel():
            ring.post_copy(seq, item, [tensor.detach().view(-1)])
        else:
            ring.control.publish(seq, item[2], NOWHERE, 0)
        ring.control.mark_done(seq)
        return SENT

    def receive(self, item: Item, tensor: Tensor) -> Received:
        """Start to receive into a contiguous tensor."""
        ring = self._ring
        return Received(ring, item, ring.begin(item), tensor)

    def abort(self) -> None:
        """Make every wait of both ranks for a message that was not sent yet fail now."""
        self._ring.abort()
        self._ring.control.close()

    def close(self) -> None:
        """Send nothing more. What was sent can still be received."""
        self._ring.close()


class Sent:
    """A message that its sender need not wait for."""

    def wait(self) -> None:
        """Return at once."""


SENT = Sent()


class Received(Pending):
    """A message on its way to this rank."""

    __slots__ = ("_tensor",)

    def __init__(self, ring: Ring, item: Item, seq: int, tensor: Tensor) -> None:
        super().__init__(ring, item, seq)
        self._tensor = tensor

    def complete(self, ring: Ring) -> None:
        """Copy it."""
        target, (seq,) = self._tensor.detach().view(-1), self._seqs
        del self._tensor
        mapping = ring.mapping(0)
        ring.await_post(self._item, seq, 0, mapping)
        if target.numel():
            place, _ = mapping.control.place(seq)
            target.copy_(mapping.tensor(place, 0, target.numel(), target.dtype))
