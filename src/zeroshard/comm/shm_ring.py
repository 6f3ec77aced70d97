"""What ranks of a host publish and have read, by the numbers of their collectives."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from torch import Tensor

from zeroshard.comm.collectives import (
    ErrorExplainer,
)
from zeroshard.comm.host import fate_of
from zeroshard.comm.recorder import Item, Recorder
from zeroshard.comm.shared_memory import RING, PeerMapping, PeerMemory

#: Looks at the control block before a wait sleeps. All of them take a few microseconds.
_LOOKS = 32
#: The longest sleep. Between sleeps Python handles signals, and the peer's process is checked.
_SLICE_S = 0.25
_POLL_S = 0.0005  # pause between two looks for a mark, which wakes no sleeper
_CATCH_UP_S = 1.0  # how long the source of a large broadcast lets its readers catch up
NOWHERE = (0, 0, 0)
move_bytes = ctypes.memmove


class Ring:
    """Publishes this rank's sources and waits for those of the others. Handles keep it alive.

    A slot is reused after :data:`RING` collectives. :meth:`begin` then finishes the old collective on
    this rank and waits until all ranks have read it, so that no rank misses a source however many
    collectives are in flight.
    """

    def __init__(
        self, memory: PeerMemory, ranks: Sequence[int], recorder: Recorder, guard: ErrorExplainer
    ) -> None:
        self.arena = memory.arena
        self.control = memory.arena.control
        self.rank = rank = memory.rank
        self.size = len(ranks)
        # Start with the neighbour, so that not every rank reads from rank 0 first.
        order = [(rank + i) % len(ranks) for i in range(1, len(ranks))]
        self.mappings = [(peer, memory.mappings[peer]) for peer in order]
        self.arena.readers = [mapping.control for _, mapping in self.mappings]
        self._processes = memory.processes
        self._ranks = ranks
        self._recorder = recorder
        self._guard = guard
        self._timeout_s = memory.timeout_s
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

    def post_copy(self, seq: int, item: Item, parts: Sequence[Tensor]) -> None:
        """Publish a copy of ``parts``, one after another, so that the caller may write its tensors."""
        nbytes = sum(part.nbytes for part in parts)
        block = self.arena.take(nbytes)
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
        move_bytes(self.control.inline(seq), tensor.data_ptr(), tensor.nbytes)
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
    """A collective in flight, of one or more sequence numbers. Keeps its buffers alive until the wait.

    ``complete`` reads what this rank needs of the other ranks' memory.
    """

    __slots__ = ("_seqs", "complete", "ring")

    def __init__(self, ring: Ring, seqs: Iterable[int], complete: Callable[[], None]) -> None:
        self.ring: Ring | None = ring
        self.complete: Callable[[], None] | None = complete
        self._seqs = tuple(seqs)
        ring.pending.update(dict.fromkeys(self._seqs, self))

    def wait(self) -> None:
        ring, self.ring = self.ring, None
        complete, self.complete = self.complete, None
        if ring is not None and complete is not None:
            complete()
            for seq in self._seqs:
                ring.control.mark_done(seq)
                ring.pending.pop(seq, None)
