"""Records the collectives of a rank: their order, a running hash, and how much the rank sent.

[Note: recorder] The decision: docs/decisions/0003-tagged-transport.md. The byte layout of a recording is
in :mod:`zeroshard.run.recordings`.

A :class:`Recorder` belongs to one group of ranks. Every collective of that group passes through
:meth:`Recorder.enter`, which numbers it (``seq``), folds it into the history hash and writes a record.
Budget: 0.5 us per collective, no formatting, no store call, no host synchronisation.

Who owns which memory. The recorder owns its recording: a file (in ``/dev/shm``, if there is one) that
processes of this host may read, or private memory. It removes the file when it is closed, collected, or
at exit. After SIGKILL the file stays, so that the other ranks can read what the dead rank did last; the
last rank that ends on this host removes it, and :func:`sweep_recordings` removes what is left.

Which thread does what. One thread calls collectives, and only that thread enters them. The watchdog's
thread only reads (:meth:`~Recorder.oldest_pending`, :meth:`~Recorder.flight`) and writes the word
"waiting" of the recording (:meth:`~Recorder.note_wait`).

Invariants, and what breaks without them:

* Every collective is recorded, in the order of the calls, before it starts. Otherwise a rank could wait
  in a collective that neither its hash nor its recording contains.
* The lower 31 bits of the hash are the tag of a message, the upper 32 bits are compared at step
  boundaries (:attr:`Recorder.hash32`). The two parts are disjoint, so a divergence that a tag misses (one
  in 2**31) is seen at the next boundary.
* A forked child writes to a private copy (:meth:`Recorder.detach`). Otherwise it would overwrite the
  records of its parent, and remove the parent's file when it ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from zeroshard.core.files import for_this_user
from zeroshard.device.choice import ops_of
from zeroshard.device.ops import DeviceOps, Event
from zeroshard.run.recordings import (
    MASK_64,
    MULTIPLIER,
    RING_AT,
    SLOT,
    STEP,
    FlightRecorder,
    FlightRecording,
    Record,
    read_recording,
    remove_recording,
    word_of,
    word_with,
)

_pack = SLOT.pack_into
_monotonic = time.monotonic


BLOCKED_S = 20e-6
"""A wait that took longer was for a collective still in flight, so that its end is known."""


class Listener(Protocol):
    """Hears of the collectives of a rank, in order: of a simulated rank, whose step is then timed."""

    def entered(self, recorder: Recorder, entry: Entry) -> None:
        """A collective starts."""

    def finished(self, recorder: Recorder, entry: Entry) -> None:
        """The program has waited for a collective of a process group."""


class Entry:
    """One (operation, name) pair: its size, its word, its row in the recording, and its traffic.

    A pair nearly always moves the same buffer. Size, word and row are therefore kept from call to call,
    and traffic is added up only when the size changes.
    """

    def __init__(self, op: str, name: str) -> None:
        self.op = op
        self.name = name
        self.digest = word_of(op, name)
        self.numel = -1
        self.dtype: torch.dtype | None = None
        self.sent = 0
        self.word = 0
        self.row = 0
        self.began_s = 0.0  # when the last call started
        self.rows: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        self.reset()

    def bank(self) -> None:
        """Add up the traffic at the present size, before the size changes."""
        self._sent_nbytes = self.sent_nbytes
        self._payload_numel, self._sent_numel = self.payload_numel, self.sent_numel
        self._calls = self.calls

    def reset(self) -> None:
        """Set the traffic, and the time of waits, to zero."""
        self.waited_s = 0.0  # that the host was blocked in waits
        self.calls = self._calls = self._payload_numel = self._sent_numel = self._sent_nbytes = 0
        # Of the calls whose wait blocked the host: seconds from start to arrival, and bytes sent.
        self.flight_s, self.flight_nbytes = 0.0, 0

    @property
    def payload_numel(self) -> int:
        """Elements of the full buffers moved so far."""
        return self._payload_numel + (self.calls - self._calls) * self.numel

    @property
    def sent_numel(self) -> int:
        """Elements that this rank has sent so far."""
        return self._sent_numel + (self.calls - self._calls) * self.sent

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent so far."""
        itemsize = self.dtype.itemsize if self.dtype is not None else 0
        return self._sent_nbytes + (self.calls - self._calls) * self.sent * itemsize

    def note_flight(self, now_s: float) -> None:
        """The last call has ended, and the host was blocked until then."""
        if self.dtype is not None:
            self.flight_s += now_s - self.began_s
            self.flight_nbytes += self.sent * self.dtype.itemsize


class Entries(dict[str, Entry]):
    """Entries of one operation, by name. An entry is made when its name is first looked up."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __missing__(self, name: str) -> Entry:
        entry = self[name] = Entry(self.op, name)
        return entry


#: A collective in flight: its sequence number, its entry, and the history hash that includes it. Tags are
#: the lower 31 bits of the hash (:data:`TAG_BITS`); a history that differs gives another tag.
Item = tuple[int, Entry, int]
TAG_BITS = 0x7FFF_FFFF


class Recorder:
    """The ordered history of one group's collectives on this rank.

    ``group`` names the group and seeds the hash, so that two groups have different tags. ``ring`` is the
    number of records kept, rounded up to a power of two. ``recording`` is the path of the file for the
    recording, which other processes can read; None: private memory.
    """

    def __init__(
        self,
        group: str = "data",
        *,
        ring: int = 256,
        recording: Path | None = None,
        rank: int = 0,
        group_size: int = 1,
    ) -> None:
        self.group = group
        self.rank = rank
        self.seq = 0
        self.step = 0
        self.section = ""
        self.listener: Listener | None = None
        #: The collective that the host is blocked in, from :meth:`begin_wait` to :meth:`end_wait`.
        self.waiting: Item | None = None
        self.waiter = 0  # the thread that waits, if it may be another one than the program's
        self.blocked_s = 0.0  # of the host in waits; a device's waits do not block it
        #: Hears when a step begins, if the speed of ranks is compared; see ``watchdog/pace.py``.
        self.on_step: Callable[[int, float], None] | None = None
        #: Collectives in flight on a device, each with an event; None without :meth:`watch_device`.
        self.pending: deque[tuple[Item, Event]] | None = None
        self._ops = ops_of(torch.device("cpu"))  # of the device of those events
        self._spare_events: list[Event] = []
        self.compares = True  # False: the transport moves no bytes, so hashes cannot be compared
        self._hashes: tuple[torch.Tensor, Any] | None = (
            None  # on their way to the host, and the event
        )
        self._step_times_s: deque[float] = deque(maxlen=32)
        self._history = word_of("group", group)
        self._by_op: dict[str, Entries] = {}
        self._gathers = self.entries("all_gather")
        self._reductions = self.entries("reduce_scatter")
        self._small = self.entries("gather_small")
        size = 1 << max(ring - 1, 1).bit_length()
        self._mask = size - 1
        self._slots = tuple(range(RING_AT, RING_AT + size * SLOT.size, SLOT.size))
        self._map = _open_recording(recording, FlightRecorder.nbytes_for(size))
        self._remove: weakref.finalize[..., Recorder] | None = None
        if recording is not None:
            # Runs when it is closed or collected, and at exit. Not after SIGKILL, nor in a child.
            self._remove = weakref.finalize(self, remove_recording, recording)
            _IN_FILES.add(self)
        self._log = FlightRecorder(
            self._map, ring=size, pid=os.getpid(), rank=rank, group_size=group_size
        )

    def entries(self, op: str) -> Entries:
        """The table that :meth:`enter` takes its entries from, one per operation."""
        return self._by_op.setdefault(op, Entries(op))

    def enter(self, entry: Entry, tensor: torch.Tensor, numel: int, sent: int) -> Item:
        """Record one collective of ``numel`` elements in all, of which this rank sends ``sent``."""
        if entry.numel != numel or entry.dtype is not tensor.dtype:
            self._resize(entry, tensor, numel, sent)
        self._history = history = (self._history * MULTIPLIER ^ entry.word) & MASK_64
        self.seq = seq = self.seq + 1
        entry.calls += 1
        entry.began_s = now_s = _monotonic()
        _pack(self._map, self._slots[seq & self._mask], history, entry.row, now_s, seq)
        if self.listener is not None:
            self.listener.entered(self, entry)
        return seq, entry, history

    def all_gather(self, name: str, full_N: torch.Tensor, shard_S: torch.Tensor) -> Item:
        """Record an all-gather: this rank gets all of ``full_N`` but its shard."""
        numel = full_N.numel()
        return self.enter(self._gathers[name], full_N, numel, numel - shard_S.numel())

    def reduce_scatter(self, name: str, out_S: torch.Tensor, full_N: torch.Tensor) -> Item:
        """Record a reduce-scatter: this rank sends all of ``full_N`` but its own slice."""
        numel = full_N.numel()
        return self.enter(self._reductions[name], full_N, numel, numel - out_S.numel())

    def all_to_all(self, name: str, full_N: torch.Tensor, own_numel: int) -> Item:
        """Record an all-to-all: this rank sends all of ``full_N`` but ``own_numel`` elements."""
        numel = full_N.numel()
        return self.enter(self.entries("all_to_all")[name], full_N, numel, numel - own_numel)

    def gather_small(self, name: str, vector_K: torch.Tensor, receivers: int) -> Item:
        """Record an all-gather of a small vector, which goes to ``receivers`` ranks."""
        numel = vector_K.numel()
        return self.enter(self._small[name], vector_K, numel, numel * receivers)

    def broadcast(self, name: str, tensor: torch.Tensor, source: int, receivers: int) -> Item:
        """Record a broadcast from rank ``source``, which sends to ``receivers`` ranks; 0 elsewhere."""
        numel = tensor.numel()
        entry = self.entries(f"broadcast from {source}")[name]
        return self.enter(entry, tensor, numel, numel * receivers)

    def begin_wait(self, item: Item) -> float:
        """The host is blocked in ``item`` from now on. Returns the time, for :meth:`end_wait`."""
        self.waiting = item
        return _monotonic()

    def end_wait(self, item: Item, began_s: float) -> None:
        """The host goes on."""
        self.waiting = None
        now_s = _monotonic()
        waited_s, entry = now_s - began_s, item[1]
        entry.waited_s += waited_s
        self.blocked_s += waited_s
        if waited_s > BLOCKED_S:
            entry.note_flight(now_s)

    def _resize(self, entry: Entry, tensor: torch.Tensor, numel: int, sent: int) -> None:
        entry.bank()
        dtype = entry.dtype = tensor.dtype
        entry.numel, entry.sent = numel, sent
        known = entry.rows.get((numel, dtype))
        if known is None:
            name = dtype_name(dtype)
            nbytes = numel * tensor.element_size()
            row = self._log.row(entry.op, entry.name, nbytes, name)
            known = entry.rows[numel, dtype] = (row, word_with(entry.digest, nbytes, name))
        entry.row, entry.word = known

    def note(self, *words: str) -> None:
        """Fold into the history what every rank must do at this point, without a message."""
        self._history = (self._history * MULTIPLIER ^ word_of(*words)) & MASK_64

    @property
    def hash64(self) -> int:
        """The running hash over (operation, name, bytes, dtype) of every collective so far."""
        return self._history

    @property
    def hash32(self) -> float:
        """The upper half of the running hash: a whole number that float64 holds exactly.

        Tags are made of the lower half. This half sees the divergences that a tag misses (one in 2**31).
        """
        return float(self._history >> 32)

    def diverging(self, hashes_W: torch.Tensor) -> list[int]:
        """The positions in the group whose hash is not the most frequent one; empty if all are equal.

        ``hashes_W``: :attr:`hash32` of every rank at the same point. On an accelerator the hashes of an
        earlier call are compared, so that the host does not wait for the device. Fakes are equal.
        """
        if not self.compares:
            return []
        ops = ops_of(hashes_W.device)
        if not ops.is_async:
            return _odd(hashes_W.tolist())
        if ops.is_capturing():
            return []
        odd: list[int] = []
        if self._hashes is not None:
            copy, copied = self._hashes
            if not copied.query():
                return []
            odd = _odd(copy.tolist())
        copy = torch.empty(hashes_W.shape, dtype=hashes_W.dtype, pin_memory=True)
        copy.copy_(hashes_W, non_blocking=True)
        copied = ops.event()
        copied.record()
        self._hashes = (copy, copied)
        return odd

    def mark_step(self, step: int) -> None:
        """Note that step ``step`` begins; messages and dumps name it."""
        self.step = step
        now_s = _monotonic()
        self._step_times_s.append(now_s)
        if self.on_step is not None:
            self.on_step(step, now_s)
        self._log.words[STEP] = step

    def median_step_s(self) -> float:
        """Median time in seconds between the last 32 steps; 0 before there are two."""
        times = list(self._step_times_s)
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0

    def mark_section(self, section: str) -> None:
        """Note what this rank does outside collectives from now on (``data``, ``save``...; "": none)."""
        self.section = section
        self._log.section(section)

    @contextlib.contextmanager
    def in_section(self, name: str) -> Iterator[None]:
        """A context in which this rank is in section ``name``, which has its own limit."""
        outer = self.section
        self.mark_section(name)
        try:
            yield
        finally:
            self.mark_section(outer)

    def watch_device(self, ops: DeviceOps) -> None:
        """Follow the progress of a device by events, since its waits do not block the host."""
        self.pending = deque()
        self._ops = ops

    def enter_thread(self) -> None:
        """Prepare the calling thread for :meth:`oldest_pending`, which queries events of the device."""
        self._ops.select()
        self._ops.tolerate_captures()

    def note_waited(self, item: Item) -> None:
        """Tell the listener that the rank goes on only when ``item`` is done."""
        if self.listener is not None:
            self.listener.finished(self, item[1])

    def note_pending(self, item: Item) -> None:
        """Record an event: ``item`` is done when the current stream reaches this point."""
        self.note_waited(item)
        if self.pending is not None and not self._ops.is_capturing():
            spare = self._spare_events
            event = spare.pop() if spare else self._ops.event()
            event.record()
            self.pending.append((item, event))

    def oldest_pending(self) -> Item | None:
        """What the host is blocked in, else the oldest collective that the device has not finished."""
        pending = self.pending
        while pending and pending[0][1].query():
            self._spare_events.append(pending.popleft()[1])
        return self.waiting or (pending[0][0] if pending else None)

    def note_wait(self) -> None:
        """Write what the host waits in to the recording. Called by the watchdog, not on the hot path."""
        item = self.waiting
        self._log.mark_waiting(item[0] if item is not None else 0)

    def flight(self) -> FlightRecording:
        """The recording, as another process would read it. Safe to call from another thread."""
        flight = read_recording(self._map[:], self._map[:])
        assert flight is not None  # our own bytes
        waiting = self.waiting
        return flight._replace(waiting=waiting[0] if waiting is not None else 0)

    def records(self, last: int | None = None) -> tuple[Record, ...]:
        """The newest ``last`` records (None: all that are kept), oldest first."""
        return self.flight().records[-last if last else None :]

    # -- traffic -----------------------------------------------------------------------------------

    def _totals(self, field: str) -> Counter[str]:
        totals: Counter[str] = Counter()
        for entry in self.traffic():
            totals[entry.op.partition(" ")[0]] += getattr(entry, field)  # "broadcast from 0"
        return totals

    @property
    def sent_numel(self) -> Counter[str]:
        """Elements that this rank sent, by operation: (W - 1) * S for a gather or a reduction of S."""
        return self._totals("sent_numel")

    @property
    def payload_numel(self) -> Counter[str]:
        """Elements of the full buffers moved, by operation: N for a gather or a reduction of N."""
        return self._totals("payload_numel")

    @property
    def calls(self) -> Counter[str]:
        """Number of collectives, by operation."""
        return self._totals("calls")

    def traffic(self) -> Iterator[Entry]:
        """Every (operation, name) with its counters."""
        for table in list(self._by_op.values()):
            yield from list(table.values())

    def reset_traffic(self) -> None:
        """Set all counters to zero. Sequence number, hash and recording do not change."""
        for entry in self.traffic():
            entry.reset()

    # -- end ---------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Continue in private memory. The file stays; in a forked child it belongs to the parent."""
        if self._remove is None:
            return
        self._remove.detach()
        self._remove = None
        shared, log, raw = self._map, self._log, self._map[:]
        private = mmap.mmap(-1, len(raw))
        self._log = FlightRecorder(
            private, ring=self._mask + 1, pid=os.getpid(), rank=0, group_size=1
        )
        private[:] = raw
        self._map = private
        log.release()
        shared.close()

    def close(self) -> None:
        """Remove the file, and its directory if that is empty then. The history stays readable."""
        if self._remove is not None:
            self._remove()
            self.detach()


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _open_recording(recording: Path | None, nbytes: int) -> mmap.mmap:
    if recording is None:
        return mmap.mmap(-1, nbytes)
    recording.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(recording, "wb+", opener=for_this_user) as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)


#: Recorders with a file. Process-wide, as the fork hook below is, which cannot be removed again.
_IN_FILES: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _detach_all() -> None:
    for recorder in list(_IN_FILES):
        recorder.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)


def _odd(values: list[float]) -> list[int]:
    if min(values) == max(values):
        return []
    common = max(values, key=values.count)
    return [at for at, value in enumerate(values) if value != common]
