"""Collectives of CPU ranks of one host, which read each other's memory.

W ranks; N padded elements, S = N // W; K elements of a small vector.

[Note: collectives in shared memory] The decision and its measurements are in
docs/decisions/0006-shared-memory.md; :mod:`zeroshard.comm.shared_memory` explains arenas, blocks, slots
and marks.

A collective is numbered (``seq``). To start it, a rank publishes where its *source* lies, under the
number and the *tag*, which is the hash of all collectives of the group so far. To finish it (``wait``),
a rank copies or sums from the other ranks' sources, then marks ``seq`` as read. There is no barrier.

Who owns which memory:

* The source of a gather, or of a large broadcast, is a copy in a block of this rank (a *staging
  block*). After this rank's ``wait`` the caller may write its tensor while slower ranks still read the
  copy. It has to be a copy, because parameters are written by code that knows nothing of readers.
* The source of a reduction is the caller's tensor itself if :meth:`ShmComm.allocate` made it; otherwise a
  copy of the slices that the other ranks sum. The slice of this rank is its own after ``wait``. The other
  slices still belong to their readers, even then.
* The target of a collective belongs to the handle until ``wait`` has returned.

Invariants, and what breaks without them:

* A block is reused only when no tensor lies in it and all ranks have marked what was published from it
  (``Arena.take``); before this rank's own communicator writes into a lent block, it waits for those
  marks (``Ring.await_readers``). Otherwise a slow rank reads data of a later collective.
* A source that was published under another tag counts as not published. Ranks that call different
  collectives therefore wait, and the watchdog names them; without tags they would sum unrelated tensors.
* A slot is reused after :data:`~.shared_memory.RING` collectives. ``Ring.begin`` first finishes this
  rank's pending handle of the old collective, then waits until all ranks have marked it. Every rank does
  so at the same number, so none waits for a rank that waits for it. Without it a rank could miss what was
  published.
* The source of a large broadcast waits for its readers for at most a second. Without that limit, ranks
  that wait for their handles in different orders would block each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from zeroshard.comm.collectives import (
    DONE,
    ErrorExplainer,
    Handle,
    NoExplainer,
    RecordedComm,
    closed,
    sum_in_rank_order,
)
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shared_memory import INLINE_NBYTES, Block, PeerMemory
from zeroshard.comm.shm_ring import NOWHERE, Pending, Ring, move_bytes

#: A large broadcast travels in at most ``_PIECES`` pieces of at least ``_PIECE_NBYTES`` bytes.
_PIECES = 64
_PIECE_NBYTES = 1 << 18
#: The number of pieces that the source holds copies of.
AHEAD = 4


class ShmComm(RecordedComm):
    """Collectives through memory that ranks of one host share.

    ``ranks`` are the global ranks of the group in order. Every rank adds in that order; 16-bit sums
    accumulate in fp32 and are rounded once.
    """

    transport = "shm"

    def __init__(
        self,
        memory: PeerMemory,
        *,
        ranks: Sequence[int],
        recorder: Recorder | None = None,
        guard: ErrorExplainer | None = None,
    ) -> None:
        super().__init__(memory.rank, ranks, recorder, guard)
        self._ring: Ring | None = Ring(memory, self.ranks, self.recorder, self._guard)

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of the blocks that hold sources, without those that :meth:`allocate` has lent."""
        return self._ring.arena.own_nbytes if self._ring is not None else 0

    @property
    def scratch_peak_nbytes(self) -> int:
        """The most bytes of all blocks so far, those lent included."""
        return self._ring.arena.peak_nbytes if self._ring is not None else 0

    def allocate(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """``[numel]`` that the other ranks can read: a reduction of it needs no copy.

        After a ``reduce_scatter`` of it, the other ranks may read their slices even when this rank's
        ``wait`` has returned. So write only this rank's slice from then on, and drop the tensor. The
        memory is reused when all ranks have read it. Its storage cannot be resized.
        """
        if self._ring is None or not numel or device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=device)
        block: Block = self._ring.arena.take(numel * dtype.itemsize, slack=1)
        return block.lend(numel, dtype)

    def all_gather(self, full_N: Tensor, shard_S: Tensor, *, name: str) -> Handle:
        """Publish a copy of ``shard_S``. ``wait`` copies every other rank's slice into ``full_N``."""
        item = self.recorder.all_gather(name, full_N, shard_S)
        if not full_N.numel():
            return DONE
        slices = full_N.detach().view(self.size, -1).unbind()
        return self._gather(item, slices, shard_S.detach())

    def _gather(self, item: Item, slices: Sequence[Tensor], shard_S: Tensor) -> Handle:
        ring = self._open(item)
        seq = ring.begin(item)
        # Always a copy: the other ranks cannot read the shard's memory, and the next update writes it.
        ring.post_copy(seq, item, [shard_S])
        own = slices[self.rank]
        if own.data_ptr() != shard_S.data_ptr():
            own.copy_(shard_S)
        return Pending(ring, [seq], partial(_read, ring, item, seq, slices))

    def reduce_scatter(self, out_S: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Publish ``full_N``, or a copy of the others' slices. ``wait`` sums from the others' memory."""
        item = self.recorder.reduce_scatter(name, out_S, full_N)
        if not full_N.numel():
            return DONE
        ring = self._open(item)
        seq = ring.begin(item)
        full_N = full_N.detach()
        if not ring.post_in_place(seq, item, full_N):
            shard_numel = out_S.numel()
            begin, end = self.rank * shard_numel, (self.rank + 1) * shard_numel
            ring.post_copy(seq, item, [full_N[:begin], full_N[end:]])
        return Pending(ring, [seq], partial(_add, ring, item, seq, out_S.detach(), full_N))

    def all_to_all(self, out_N: Tensor, full_N: Tensor, *, name: str) -> Handle:
        """Publish a copy of the others' slices. ``wait`` copies theirs for this rank into ``out_N``."""
        item = self.recorder.all_to_all(name, full_N, full_N.numel() // self.size)
        if not full_N.numel():
            return DONE
        ring = self._open(item)
        seq = ring.begin(item)
        begin, end = (full_N.numel() // self.size * at for at in (self.rank, self.rank + 1))
        ring.post_copy(seq, item, [full_N[:begin], full_N[end:]])
        out_N[begin:end].copy_(full_N[begin:end])
        received = out_N.view(self.size, -1).unbind()
        return Pending(ring, [seq], partial(_read, ring, item, seq, received, of_each=True))

    def all_gather_small(self, vector_K: Tensor, *, name: str) -> Tensor:
        """A vector of up to 208 bytes travels inside the slot; a larger one is gathered."""
        vector = vector_K.detach().contiguous()
        numel = vector.numel()
        item = self.recorder.gather_small(name, vector, self.size - 1)
        rows = vector.new_empty((self.size, numel))
        nbytes = vector.nbytes
        if not numel:
            return rows
        if nbytes > INLINE_NBYTES:
            self._gather(item, rows.unbind(), vector.view(-1)).wait()
            return rows
        ring = self._open(item)
        seq = ring.begin(item)
        ring.post_inline(seq, item, vector)
        first = rows.data_ptr()
        move_bytes(first + self.rank * nbytes, vector.data_ptr(), nbytes)
        for peer, mapping in ring.mappings:
            ring.await_post(item, seq, peer, mapping)
            move_bytes(first + peer * nbytes, mapping.control.inline(seq), nbytes)
        ring.control.mark_done(seq)
        return rows

    def broadcast(self, tensor: Tensor, src: int, *, name: str) -> Handle:
        """The source publishes copies, piece by piece; the others read them in ``wait``."""
        item, numel = self._record_broadcast(tensor, src, name), tensor.numel()
        if not numel:
            return DONE
        ring = self._open(item)
        flat = tensor.detach().view(-1)
        if flat.nbytes <= INLINE_NBYTES:
            return self._broadcast_small(ring, item, flat, src)
        step = piece_numel(numel, flat.element_size())
        pieces = {ring.begin(item): piece for piece in flat.split(step)}
        if src != self.rank:
            return Pending(ring, pieces, partial(_read_pieces, ring, item, src, pieces))
        for seq, piece in list(pieces.items())[:AHEAD]:
            ring.post_copy(seq, item, [piece])
        return Pending(ring, pieces, partial(_send_rest, ring, item, pieces))

    def _broadcast_small(self, ring: Ring, item: Item, flat: Tensor, src: int) -> Handle:
        seq = ring.begin(item)
        if src != self.rank:
            return Pending(ring, [seq], partial(read_small, ring, item, seq, src, flat))
        ring.post_inline(seq, item, flat)
        ring.control.mark_done(seq)  # there is nothing for the source to read
        return DONE

    def _open(self, item: Item) -> Ring:
        if self._ring is None:
            raise closed(item[1])
        return self._ring

    def abort(self) -> None:
        """Make every blocked wait fail now. Called by the watchdog's thread."""
        ring = self._ring
        if ring is not None:
            ring.abort()

    def close(self) -> None:
        """Publish nothing more, and wake ranks that wait.

        Memory that tensors or handles still use is freed with the last of them.
        """
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()
        self.recorder.close()


def piece_numel(numel: int, itemsize: int) -> int:
    """Elements of each piece in which a large broadcast travels; the last one may have fewer."""
    return max(-(-numel // _PIECES), _PIECE_NBYTES // itemsize)


def _read(
    ring: Ring, item: Item, seq: int, slices: Sequence[Tensor], *, of_each: bool = False
) -> None:
    """Copy what the others have published. ``of_each``: only the slice for this rank."""
    ring.await_readers(item, slices[0])
    for peer, mapping in ring.mappings:
        ring.await_post(item, seq, peer, mapping)
        target = slices[peer]
        if target.numel():
            place, _ = mapping.control.place(seq)
            # What was published leaves out the peer's own slice.
            skip = (ring.rank - (ring.rank > peer)) * target.nbytes if of_each else 0
            target.copy_(mapping.tensor(place, skip, target.numel(), target.dtype))


def _add(ring: Ring, item: Item, seq: int, out_S: Tensor, full_N: Tensor) -> None:
    """Sum the slices of all ranks for this one."""
    numel, rank = out_S.numel(), ring.rank
    parts = [*full_N.view(ring.size, numel).unbind()]
    for peer, mapping in ring.mappings:
        ring.await_post(item, seq, peer, mapping)
        place, nbytes = mapping.control.place(seq)
        # A copy leaves out the peer's own slice, so later slices begin one slice earlier.
        at = rank if nbytes == full_N.nbytes else rank - (rank > peer)
        parts[peer] = mapping.tensor(place, at * out_S.nbytes, numel, out_S.dtype)
    sum_in_rank_order(parts, out_S)


def read_small(ring: Ring, item: Item, seq: int, src: int, flat: Tensor) -> None:
    """Copy a broadcast out of its slot."""
    mapping = ring.mapping(src)
    ring.await_post(item, seq, src, mapping)
    move_bytes(flat.data_ptr(), mapping.control.inline(seq), flat.nbytes)


def _read_pieces(ring: Ring, item: Item, src: int, pieces: Mapping[int, Tensor]) -> None:
    """Copy a large broadcast, piece by piece."""
    mapping = ring.mapping(src)
    for seq, piece in pieces.items():
        ring.await_readers(item, piece)
        ring.await_post(item, seq, src, mapping)
        place, _ = mapping.control.place(seq)
        piece.copy_(mapping.tensor(place, 0, piece.numel(), piece.dtype))
        ring.control.mark_done(seq)
        ring.control.notify()  # the source may be in catch_up


def _send_rest(ring: Ring, item: Item, pieces: Mapping[int, Tensor]) -> None:
    """Publish the pieces after the first ``AHEAD``, each when an earlier one was read."""
    for seq, piece in list(pieces.items())[AHEAD:]:
        ring.catch_up(item, seq - AHEAD)
        ring.post_copy(seq, item, [piece])
    ring.catch_up(item, max(pieces))


class ShmLink:
    """All messages from one rank to another one. Both ranks have one, and call it in the same order.

    A message costs a copy on each side, and a call that wakes the receiver if it sleeps. A message
    through gloo costs several times as much: a thread of each rank reads and writes sockets. The sender
    copies a message into a block of its own memory when it starts to send, and does not wait for the
    receiver. There are as many blocks as messages were ever on their way at once.

    ``ranks``: the sender and the receiver, as global ranks. They are ranks 0 and 1 of ``memory``.
    """

    def __init__(
        self,
        memory: PeerMemory,
        ranks: Sequence[int],
        recorder: Recorder,
        guard: ErrorExplainer | None,
    ) -> None:
        self._ring = Ring(memory, ranks, recorder, guard or NoExplainer())

    def send(self, item: Item, tensor: Tensor) -> Handle:
        """Start to send. The caller may write its tensor afterwards, and need not wait."""
        ring = self._ring
        seq = ring.begin(item)
        if tensor.numel():
            ring.post_copy(seq, item, [tensor.detach().view(-1)])
        else:
            ring.control.publish(seq, item[2], NOWHERE, 0)
        ring.control.mark_done(seq)
        return DONE

    def receive(self, item: Item, tensor: Tensor) -> Handle:
        """Start to receive into a contiguous tensor."""
        ring = self._ring
        seq = ring.begin(item)
        return Pending(ring, [seq], partial(_read, ring, item, seq, [tensor.detach().view(-1)]))

    def abort(self) -> None:
        """Make every wait of both ranks for a message that was not sent yet fail now."""
        self._ring.abort()
        self._ring.control.close()

    def close(self) -> None:
        """Send nothing more. What was sent can still be received."""
        self._ring.close()
