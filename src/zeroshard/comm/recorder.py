"""What has this rank called, in which order, and how much did it send?

A :class:`Recorder` belongs to one group of ranks. Every collective of that group passes through
:meth:`Recorder.enter`, which numbers it, folds it into a running hash and writes it to the flight
log. Budget: 0.5 us per collective, no formatting, no store call, no host synchronisation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from zeroshard.comm.flight_recorder import (
    MASK_64,
    MULTIPLIER,
    RING_AT,
    SLOT,
    FlightRecorder,
    FlightRecording,
    Record,
    read_recording,
    read_recording_pid,
    word_of,
    word_with,
)

_pack = SLOT.pack_into
_monotonic = time.monotonic


class Entry:
    """All that is known of one (operation, name) pair, and what it has sent so far.

    A pair nearly always moves the same buffer: size, word and row of the log are kept from call to
    call, and the traffic is added up when they change.
    """

    __slots__ = (
        "_calls",
        "_payload_numel",
        "_sent_numel",
        "calls",
        "digest",
        "dtype",
        "name",
        "numel",
        "op",
        "row",
        "rows",
        "sent",
        "word",
    )

    def __init__(self, op: str, name: str) -> None:
        self.op = op
        self.name = name
        self.digest = word_of(op, name)
        self.numel = -1
        self.dtype: torch.dtype | None = None
        self.sent = 0
        self.word = 0
        self.row = 0
        self.rows: dict[tuple[int, torch.dtype], tuple[int, int]] = {}
        self.reset()

    def bank(self) -> None:
        """Add up the traffic at the present size, before it changes."""
        self._payload_numel, self._sent_numel = self.payload_numel, self.sent_numel
        self._calls = self.calls

    def reset(self) -> None:
        """Count from zero."""
        self.calls = self._calls = self._payload_numel = self._sent_numel = 0

    @property
    def payload_numel(self) -> int:
        """Elements of the full buffers moved."""
        return self._payload_numel + (self.calls - self._calls) * self.numel

    @property
    def sent_numel(self) -> int:
        """Elements that this rank sent."""
        return self._sent_numel + (self.calls - self._calls) * self.sent


class Entries(dict[str, Entry]):
    """Entries of one operation by name; a name is prepared the first time it is seen."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def __missing__(self, name: str) -> Entry:
        entry = self[name] = Entry(self.op, name)
        return entry


#: A collective in flight: its sequence number, what it is, and the running hash with it. Tags are 31
#: bits of the hash (:data:`TAG_BITS`), so that ranks with another history never meet under one tag.
Item = tuple[int, Entry, int]
TAG_BITS = 0x7FFF_FFFF


class Recorder:
    """The ordered history of one group's collectives on this rank.

    ``group`` names the group and seeds the hash, so that two groups never share a tag. ``ring`` is
    the number of records kept, rounded up to a power of two. With ``recording`` the log lies in a file
    there, readable by others; without, in private memory.
    """

    def __init__(
        self,
        group: str = "data",
        *,
        ring: int = 256,
        recording: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.group = group
        self.rank = rank
        self.seq = 0
        self.step = 0
        self.section = ""
        #: The collective that the host blocks in; set and cleared around every wait.
        self.waiting: Item | None = None
        #: The thread that waits, if it may be another than the program's.
        self.waiter = 0
        #: Collectives in flight on a device with an event each; only kept while somebody watches.
        self.pending: deque[tuple[Item, Any]] | None = None
        self._device = 0  # the GPU that they are on
        self._step_times_s: deque[float] = deque(maxlen=32)
        self._history = word_of("group", group)
        self._by_op: dict[str, Entries] = {}
        size = 1 << max(ring - 1, 1).bit_length()
        self._mask = size - 1
        self._slots = tuple(range(RING_AT, RING_AT + size * SLOT.size, SLOT.size))
        self._map = _open_recording(recording, FlightRecorder.nbytes_for(size))
        # Also when the recorder is forgotten, and at exit; not after SIGKILL, and never in a child.
        self._remove = (
            weakref.finalize(self, remove_recording, recording) if recording is not None else None
        )
        if recording is not None:
            _IN_FILES.add(self)
        self._log = FlightRecorder(
            self._map, ring=size, pid=os.getpid(), rank=rank, world_size=world_size
        )

    def entries(self, op: str) -> Entries:
        """The table that :meth:`enter` takes its entries from, one per operation."""
        return self._by_op.setdefault(op, Entries(op))

    def enter(self, entry: Entry, tensor: torch.Tensor, numel: int, sent: int) -> Item:
        """Record one collective that moves ``numel`` elements in all, ``sent`` from this rank."""
        if entry.numel != numel or entry.dtype is not tensor.dtype:
            self._resize(entry, tensor, numel, sent)
        self._history = history = (self._history * MULTIPLIER ^ entry.word) & MASK_64
        self.seq = seq = self.seq + 1
        entry.calls += 1
        _pack(self._map, self._slots[seq & self._mask], history, entry.row, _monotonic(), seq)
        return seq, entry, history

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

    @property
    def hash64(self) -> int:
        """The running hash over (operation, name, bytes, dtype) of every collective so far."""
        return self._history

    @property
    def hash32(self) -> float:
        """The upper half of the running hash: a whole number that float64 holds exactly.

        The lower half makes the tags, so that what a tag misses (one in 2**31) this one sees.
        """
        return float(self._history >> 32)

    def mark_step(self, step: int) -> None:
        """A step begins; messages and dumps name it."""
        self.step = step
        self._step_times_s.append(_monotonic())
        self._log.mark(step=step)

    def median_step_s(self) -> float:
        """Median time between recent steps; 0 before there are two."""
        times = list(self._step_times_s)
        return median(b - a for a, b in pairwise(times)) if len(times) > 1 else 0.0

    def mark_section(self, section: str) -> None:
        """What this rank does outside collectives from now on (``data``, ``save``...; "": none)."""
        self.section = section
        self._log.section(section)

    def watch_device(self) -> None:
        """From now on the progress of the current device is followed by events, since its waits do not
        block."""
        self.pending = deque()
        self._device = torch.cuda.current_device()

    def enter_thread(self) -> None:
        """What another thread does first that looks at the device's progress (:meth:`oldest_pending`)."""
        if self.pending is not None:
            torch.cuda.set_device(self._device)

    def note_pending(self, item: Item) -> None:
        """``item`` is done when the current stream comes to here."""
        if self.pending is not None and not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event()
            event.record()
            self.pending.append((item, event))

    def oldest_pending(self) -> Item | None:
        """What the host blocks in or, on a device, the oldest collective that is not done."""
        pending = self.pending
        while pending and pending[0][1].query():
            pending.popleft()
        return self.waiting or (pending[0][0] if pending else None)

    def note_wait(self) -> None:
        """Tell the log what the host waits in. The sentinel calls it, not the hot path."""
        item = self.waiting
        self._log.mark(waiting=item[0] if item is not None else 0)

    def flight(self) -> FlightRecording:
        """The whole log, as a reader outside would see it. Safe to call from another thread."""
        raw = self._map[:]
        flight = read_recording(raw, self._map[:])
        assert flight is not None  # our own bytes
        waiting = self.waiting
        return flight._replace(waiting=waiting[0] if waiting is not None else 0)

    def records(self, last: int | None = None) -> tuple[Record, ...]:
        """The newest records, oldest first."""
        records = self.flight().records
        return records if last is None else records[-last:]

    # -- traffic -----------------------------------------------------------------------------------

    def _totals(self, field: str) -> Counter[str]:
        totals: Counter[str] = Counter()
        for entry in self.traffic():
            totals[entry.op.partition(" ")[0]] += getattr(entry, field)  # "broadcast from 0"
        return totals

    @property
    def sent_numel(self) -> Counter[str]:
        """Elements this rank sent, by operation: (W - 1) * S for a gather or a reduction of S."""
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
        """Every (operation, name) with its counters, for logs and tests."""
        for table in list(self._by_op.values()):
            yield from list(table.values())

    def reset_traffic(self) -> None:
        """Set all counters to zero; order, hash and log go on."""
        for entry in self.traffic():
            entry.reset()

    # -- end ---------------------------------------------------------------------------------------

    def detach(self) -> None:
        """Go on in private memory; a forked child leaves the file to its parent."""
        if self._remove is None:
            return
        self._remove.detach()
        self._remove = None
        shared, log, raw = self._map, self._log, self._map[:]
        private = mmap.mmap(-1, len(raw))
        self._log = FlightRecorder(
            private, ring=self._mask + 1, pid=os.getpid(), rank=0, world_size=1
        )
        private[:] = raw
        self._map = private
        log.release()
        shared.close()

    def close(self) -> None:
        """Remove the file, and its directory with the last one. The history stays readable."""
        if self._remove is not None:
            self._remove()
            self.detach()


def recording_dir(run: str) -> Path:
    """Where the logs of a run lie: in memory, if the system has a file system there."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"zeroshard-{run}"


def remove_recording(recording: Path) -> None:
    """Remove a log, and its directory with the last one."""
    with contextlib.suppress(OSError):  # gone already, or not empty yet
        recording.unlink(missing_ok=True)
        recording.parent.rmdir()


def sweep_recordings(root: Path | None = None, *, older_than_s: float = 3600.0) -> None:
    """Remove what killed processes left behind, once it is old and nobody lives who wrote it."""
    newest_s = time.time() - older_than_s
    for folder in (root or recording_dir("").parent).glob("zeroshard-*"):
        with contextlib.suppress(OSError):  # another user's, or gone by now
            if folder.stat().st_mtime > newest_s:
                continue
            files = list(folder.iterdir())
            writers = [read_recording_pid(file.read_bytes()) for file in files]
            if not any(pid is not None and Path(f"/proc/{pid}").exists() for pid in writers):
                for file in files:
                    file.unlink()
                folder.rmdir()


def read_recording_file(path: Path) -> FlightRecording | None:
    """The log another process keeps or kept at ``path``; None if there is none."""
    try:
        return read_recording(path.read_bytes(), path.read_bytes())
    except OSError:
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _open_recording(recording: Path | None, nbytes: int) -> mmap.mmap:
    if recording is None:
        return mmap.mmap(-1, nbytes)
    recording.parent.mkdir(parents=True, exist_ok=True)
    with recording.open("wb+") as file:
        file.truncate(nbytes)
        return mmap.mmap(file.fileno(), nbytes)


#: Recorders whose log is a file. Process-wide, as a fork is: its hook cannot be removed again.
_IN_FILES: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _detach_all() -> None:
    for recorder in list(_IN_FILES):
        recorder.detach()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_detach_all)
