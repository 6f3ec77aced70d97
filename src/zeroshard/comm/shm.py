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
* A slot is reused after :data:`RING` collectives. ``Ring.begin`` first finishes this rank's pending
  handle of the old collective, then waits until all ranks have marked it. Every rank does so at the
  same number, so none waits for a rank that waits for it. Without it a rank could miss what was
  published.
* The source of a large broadcast waits for its readers for at most a second. Without that limit, ranks
  that wait for their handles in different orders would block each other.
"""

from __future__ import annotations

import ctypes
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from zeroshard.comm.agreement import Store, exchange
from zeroshard.comm.collectives import (
    DONE,
    ErrorExplainer,
    Handle,
    RecordedComm,
    closed,
    sum_in_rank_order,
)
from zeroshard.comm.host import Process, fate_of, this_process
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shared_memory import INLINE_NBYTES, RING, Arena, Block, PeerMapping, unavailable

#: Looks at the control block before a wait sleeps. All of them take a few microseconds.
_LOOKS = 32
#: The longest sleep. Between sleeps Python handles signals, and the peer's process is checked.
_SLICE_S = 0.25
_POLL_S = 0.0005  # pause between two looks for a mark, which wakes no sleeper
#: A large broadcast travels in at most ``_PIECES`` pieces of at least ``_PIECE_NBYTES`` bytes.
_PIECES = 64
_PIECE_NBYTES = 1 << 18
#: The number of pieces that the source holds copies of, and how long it lets the readers catch up.
AHEAD = 4
_CATCH_UP_S = 1.0
NOWHERE = (0, 0, 0)
_move = ctypes.memmove


class PeerMemory(NamedTuple):
    """This rank's arena, the mappings of the others, and all processes, by rank inside the group."""

    arena: Arena
    mappings: Mapping[int, PeerMapping]
    processes: Sequence[Process]


def open_peer_memory(
    store: Store,
    rank: int,
    size: int,
    *,
    timeout_s: float,
    check: Callable[[Sequence[int]], None] = lambda _missing: None,
) -> PeerMemory | str:
    """Open each other's memory, or return why that is impossible: the same on all ranks. Collective.

    ``store`` is a key space that only this call uses; ``check`` may end its waits by raising.
    """
    wait = functools.partial(exchange, store, rank, size, timeout_s=timeout_s, check=check)
    arena, why = _own_arena(rank)
    mine = {"why": why, "process": asdict(this_process()), "fd": -1, "token": 0}
    if arena is not None:
        mine |= {"fd": arena.fd, "token": arena.control.token}
    cards = [json.loads(text) for text in wait(json.dumps(mine), key="card")]
    processes = [Process(**card["process"]) for card in cards]
    why = next((card["why"] for card in cards if card["why"]), "") or apart(processes)
    mappings: Mapping[int, PeerMapping] = {}
    if not why:
        mappings, why = _mappings(rank, processes, cards)
    # No rank goes on before all have opened all. After that a process may end at any time.
    answers = wait(why, key="opened")
    why = next((answer for answer in answers if answer), "")
    if arena is None:
        return why
    if why:
        arena.close()
        return why
    return PeerMemory(arena, mappings, processes)


def _own_arena(rank: int) -> tuple[Arena | None, str]:
    """The memory that this rank shares; without it the reason."""
    if why := unavailable():
        return None, why
    try:
        return Arena(), ""
    except OSError as error:
        return None, f"rank {rank} cannot create shared memory: {error}"


def _mappings(
    rank: int, processes: Sequence[Process], cards: Sequence[Mapping[str, Any]]
) -> tuple[dict[int, PeerMapping], str]:
    """The memory of the other ranks, as far as it can be opened, and why the next one cannot."""
    mappings: dict[int, PeerMapping] = {}
    for peer, card in enumerate(cards):
        if peer == rank:
            continue
        try:
            mappings[peer] = PeerMapping(processes[peer].pid, card["fd"], card["token"])
        except OSError as error:
            return mappings, (
                f"rank {rank} cannot open the memory of rank {peer}: {error.strerror or error}"
            )
    return mappings, ""


def apart(processes: Sequence[Process]) -> str:
    """Why the processes of these ranks cannot share memory; "" if they can."""
    first = processes[0]
    for rank, process in enumerate(processes):
        if not process.space or process.space != first.space:
            there = "in another container" if process.host == first.host else f"on {process.host}"
            return f"rank 0 runs on {first.host}, rank {rank} {there}"
    return ""


class ShmComm(RecordedComm):
    """Collectives through memory that ranks of one host share.

    ``ranks`` are the global ranks of the group in order. Every rank adds in that order; 16-bit sums
    accumulate in fp32 and are rounded once.
    """

    transport = "shm"

    def __init__(
        self,
        meeting: PeerMemory,
        *,
        rank: int,
        ranks: Sequence[int],
        recorder: Recorder | None = None,
        guard: ErrorExplainer | None = None,
        timeout_s: float = 1860.0,
    ) -> None:
        super().__init__(rank, ranks, recorder, guard)
        self._ring: Ring | None = Ring(
            meeting,
            rank=rank,
            ranks=self.ranks,
            recorder=self.recorder,
            guard=self._guard,
            timeout_s=timeout_s,
        )

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
        return self._ring.block(numel * dtype.itemsize, slack=1).lend(numel, dtype)

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
        return _Gather(ring, item, seq, slices)

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
        return _Reduction(ring, item, seq, out_S.detach(), full_N)

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
        _move(first + self.rank * nbytes, vector.data_ptr(), nbytes)
        for peer, mapping in ring.mappings:
            ring.await_post(item, seq, peer, mapping)
            _move(first + peer * nbytes, mapping.control.inline(seq), nbytes)
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
        return (
            _Departure(ring, item, pieces)
            if src == self.rank
            else _Arrival(ring, item, pieces, src)
        )

    def _broadcast_small(self, ring: Ring, item: Item, flat: Tensor, src: int) -> Handle:
        seq = ring.begin(item)
        if src != self.rank:
            return _SmallArrival(ring, item, seq, src, flat)
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


class Ring:
    """Publishes this rank's sources and waits for those of the others. Handles keep it alive.

    A slot is reused after :data:`RING` collectives. :meth:`begin` then finishes the old collective on
    this rank and waits until all ranks have read it, so that no rank misses a source however many
    collectives are in flight.
    """

    def __init__(
        self,
        meeting: PeerMemory,
        *,
        rank: int,
        ranks: Sequence[int],
        recorder: Recorder,
        guard: ErrorExplainer,
        timeout_s: float,
    ) -> None:
        self.arena = meeting.arena
        self.control = meeting.arena.control
        self.rank = rank
        self.size = len(ranks)
        # Start with the neighbour, so that not every rank reads from rank 0 first.
        order = [(rank + i) % len(ranks) for i in range(1, len(ranks))]
        self.mappings = [(peer, meeting.mappings[peer]) for peer in order]
        self.arena.readers = [mapping.control for _, mapping in self.mappings]
        self._processes = meeting.processes
        self._ranks = ranks
        self._recorder = recorder
        self._guard = guard
        self._timeout_s = timeout_s
        self._seq = 0
        self._aborted = False
        self.pending: dict[int, Pending] = {}

    def mapping(self, peer: int) -> PeerMapping:
        """The memory of ``peer``, a rank inside the group."""
        return self.mappings[(peer - self.rank - 1) % self.size][1]

    # -- sources -----------------------------------------------------------------------------------

    def begin(self, item: Item) -> int:
        """The sequence number of a new collective, whose slot is free.

        Raises:
            DistributedError: the waits were aborted; the guard decides which error it is.
        """
        if self._aborted:  # a late rank would find what the others had published, and go on alone
            others = [rank for rank in self._ranks if rank != self._ranks[self.rank]]
            raise self._guard.explain(item, others, "the wait was ended")
        self._seq = seq = self._seq + 1
        old = seq - RING
        if old > 0:
            pending = self.pending.get(old)
            if pending is not None:
                pending.wait()
            self.await_read(item, old)
        return seq

    def block(self, nbytes: int, *, slack: int = 2) -> Block:
        """A free block of at least ``nbytes``."""
        block: Block = self.arena.take(nbytes, slack=slack)
        return block

    def post_copy(self, seq: int, item: Item, parts: Sequence[Tensor]) -> None:
        """Publish a copy of ``parts``, one after another, so that the caller may write its tensors."""
        nbytes = sum(part.nbytes for part in parts)
        block = self.block(nbytes)
        block.use(block.nbytes)
        begin = 0
        for part in parts:
            end = begin + part.nbytes
            block.bytes[begin:end].view(part.dtype).copy_(part)
            begin = end
        block.reads.append(seq)
        self.control.publish(seq, item[2], (block.offset, block.nbytes, 0), nbytes)

    def post_in_place(self, seq: int, item: Item, tensor: Tensor) -> bool:
        """Publish ``tensor`` where it lies; False if it does not lie in a block of the arena."""
        block = self.arena.block_of(tensor)
        if block is None:
            return False
        block.reads.append(seq)
        begin = tensor.data_ptr() - block.bytes.data_ptr()
        self.control.publish(seq, item[2], (block.offset, block.nbytes, begin), tensor.nbytes)
        return True

    def post_inline(self, seq: int, item: Item, tensor: Tensor) -> None:
        """Publish the bytes of a small tensor inside the slot."""
        _move(self.control.inline(seq), tensor.data_ptr(), tensor.nbytes)
        self.control.publish(seq, item[2], NOWHERE, tensor.nbytes)

    # -- waiting -----------------------------------------------------------------------------------

    def await_post(self, item: Item, seq: int, peer: int, mapping: PeerMapping) -> None:
        """Return when ``peer`` has published collective ``item`` under the number ``seq``.

        Raises:
            DistributedError: ``peer`` ended, closed its communicator or took longer than the timeout, or
                the waits were aborted; the guard decides which error it is.
        """
        has, tag = mapping.control.has, item[2]
        for _ in range(_LOOKS):
            if has(seq, tag):
                return
        self._wait(item, peer, mapping, seq, posted=True)

    def await_read(self, item: Item, seq: int) -> None:
        """Return when all ranks have read all that they need of ``seq``; raises as :meth:`await_post`."""
        for peer, mapping in self.mappings:
            if not mapping.control.is_done(seq):
                self._wait(item, peer, mapping, seq, posted=False)

    def await_readers(self, item: Item, tensor: Tensor) -> None:
        """Return when all ranks have read what was published from the block of ``tensor``.

        Called before this communicator itself writes into ``tensor``.
        """
        block = self.arena.blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None and not block.is_read_by(self.arena.readers):
            for seq in sorted(block.reads):
                self.await_read(item, seq)

    def catch_up(self, item: Item, seq: int) -> None:
        """Wait up to a second for the other ranks to read ``seq``, so that few copies are in flight.

        Not longer: a rank that waits for its handles in another order may need what this rank starts
        next.
        """
        until_s = time.monotonic() + _CATCH_UP_S
        began_s = self._recorder.begin_wait(item)
        try:
            for _, mapping in self.mappings:
                control = mapping.control
                while not (control.closed or self._aborted):
                    event = control.event
                    if control.is_done(seq) or time.monotonic() > until_s:
                        break
                    control.sleep(event, _SLICE_S)
        finally:
            self._recorder.end_wait(item, began_s)

    def _wait(self, item: Item, peer: int, mapping: PeerMapping, seq: int, *, posted: bool) -> None:
        """Sleep until ``peer`` has published ``seq`` (``posted``), or has read it.

        Raises as :meth:`await_post`.
        """
        control, process = mapping.control, self._processes[peer]
        here = self._processes[self.rank]
        slice_s = _SLICE_S if posted else _POLL_S  # a mark wakes no sleeper
        begun_s = looked_s = time.monotonic()
        gone = ""
        began_s = self._recorder.begin_wait(item)
        try:
            while True:
                # Read before the look below: what the peer did before its end still counts.
                over = gone or ("it closed its communicator" if control.closed else "")
                event = control.event
                if control.has(seq, item[2]) if posted else control.is_done(seq):
                    return
                now_s = time.monotonic()
                if self._aborted:
                    over = over or "the wait was ended"
                elif now_s > begun_s + self._timeout_s:
                    over = over or f"nothing was received for {self._timeout_s:.0f} s"
                if over:
                    self._fail(item, peer, over)
                control.sleep(event, slice_s) if posted else time.sleep(slice_s)
                if now_s > looked_s + _SLICE_S / 2:
                    looked_s = now_s
                    fate, words = fate_of(process, here)
                    gone = words if fate == "gone" else ""
        finally:
            self._recorder.end_wait(item, began_s)

    def _fail(self, item: Item, peer: int, detail: str) -> NoReturn:
        raise self._guard.explain(item, [self._ranks[peer]], detail)

    # -- the end -----------------------------------------------------------------------------------

    def hold(self, pending: Pending, *seqs: int) -> None:
        """Remember the handle of the collectives ``seqs`` until it has been waited for."""
        self.pending.update(dict.fromkeys(seqs, pending))

    def abort(self) -> None:
        """Make every wait fail from now on."""
        self._aborted = True
        for _, mapping in self.mappings:
            mapping.control.wake()

    def close(self) -> None:
        """Publish nothing more. Collectives in flight can still be waited for."""
        self.pending.clear()
        self.control.close()


class Pending:
    """A collective in flight, of one or more sequence numbers. Keeps its buffers alive until the wait."""

    __slots__ = ("_item", "_ring", "_seqs")

    def __init__(self, ring: Ring, item: Item, *seqs: int) -> None:
        self._ring: Ring | None = ring
        self._item = item
        self._seqs = seqs
        ring.hold(self, *seqs)

    def wait(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            self.complete(ring)
            for seq in self._seqs:
                ring.control.mark_done(seq)
                ring.pending.pop(seq, None)

    def complete(self, ring: Ring) -> None:
        """Read what this rank needs of the other ranks' memory."""
        raise NotImplementedError


class _Gather(Pending):
    __slots__ = ("_slices",)

    def __init__(self, ring: Ring, item: Item, seq: int, slices: Sequence[Tensor]) -> None:
        super().__init__(ring, item, seq)
        self._slices = slices

    def complete(self, ring: Ring) -> None:
        slices, self._slices = self._slices, ()
        (seq,) = self._seqs
        ring.await_readers(self._item, slices[0])
        for peer, mapping in ring.mappings:
            ring.await_post(self._item, seq, peer, mapping)
            target = slices[peer]
            place, _ = mapping.control.place(seq)
            target.copy_(mapping.tensor(place, 0, target.numel(), target.dtype))


class _Reduction(Pending):
    __slots__ = ("_full_N", "_out_S")

    def __init__(self, ring: Ring, item: Item, seq: int, out_S: Tensor, full_N: Tensor) -> None:
        super().__init__(ring, item, seq)
        self._out_S = out_S
        self._full_N = full_N

    def complete(self, ring: Ring) -> None:
        full_N, out_S = self._full_N, self._out_S
        del self._full_N, self._out_S
        numel, rank, (seq,) = out_S.numel(), ring.rank, self._seqs
        parts = [*full_N.view(ring.size, numel).unbind()]
        for peer, mapping in ring.mappings:
            ring.await_post(self._item, seq, peer, mapping)
            place, nbytes = mapping.control.place(seq)
            # A copy leaves out the peer's own slice, so later slices begin one slice earlier.
            at = rank if nbytes == full_N.nbytes else rank - (rank > peer)
            parts[peer] = mapping.tensor(place, at * out_S.nbytes, numel, out_S.dtype)
        sum_in_rank_order(parts, out_S)


class _SmallArrival(Pending):
    __slots__ = ("_flat", "_src")

    def __init__(self, ring: Ring, item: Item, seq: int, src: int, flat: Tensor) -> None:
        super().__init__(ring, item, seq)
        self._src = src
        self._flat = flat

    def complete(self, ring: Ring) -> None:
        flat, (seq,), mapping = self._flat, self._seqs, ring.mapping(self._src)
        del self._flat
        ring.await_post(self._item, seq, self._src, mapping)
        _move(flat.data_ptr(), mapping.control.inline(seq), flat.nbytes)


class _Arrival(Pending):
    __slots__ = ("_pieces", "_src")

    def __init__(self, ring: Ring, item: Item, pieces: Mapping[int, Tensor], src: int) -> None:
        super().__init__(ring, item, *pieces)
        self._src = src
        self._pieces = pieces

    def complete(self, ring: Ring) -> None:
        pieces, self._pieces = self._pieces, {}
        mapping = ring.mapping(self._src)
        for seq, piece in pieces.items():
            ring.await_readers(self._item, piece)
            ring.await_post(self._item, seq, self._src, mapping)
            place, _ = mapping.control.place(seq)
            piece.copy_(mapping.tensor(place, 0, piece.numel(), piece.dtype))
            ring.control.mark_done(seq)
            ring.control.notify()  # the source may be in catch_up


class _Departure(Pending):
    """The source's side of a large broadcast.

    The first ``AHEAD`` pieces are published at once, each further one when an earlier one was read.
    """

    __slots__ = ("_pieces",)

    def __init__(self, ring: Ring, item: Item, pieces: Mapping[int, Tensor]) -> None:
        super().__init__(ring, item, *pieces)
        for seq, piece in list(pieces.items())[:AHEAD]:
            ring.post_copy(seq, item, [piece])
        self._pieces = pieces

    def complete(self, ring: Ring) -> None:
        pieces, self._pieces = self._pieces, {}
        for seq, piece in list(pieces.items())[AHEAD:]:
            ring.catch_up(self._item, seq - AHEAD)
            ring.post_copy(seq, self._item, [piece])
        ring.catch_up(self._item, self._seqs[-1])
