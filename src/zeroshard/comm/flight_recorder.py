"""The byte layout of a flight recording: the last collectives of a rank, readable after its death.

Pure: no torch, no files, no clock.

[Note: flight recordings] The decision: docs/decisions/0003-tagged-transport.md.

Vocabulary. A *recording* is one buffer with a ring of records and a table of names. A *record* is one
collective as one rank called it. The *history* is a running hash over (operation, name, bytes, dtype) of
every collective so far; equal histories mean equal calls in equal order.

    0     header   magic, version, pid, rank, group size, ring, rows used, step, waiting
    128   section  what the rank does outside collectives
    256   ring     (history, row, monotonic seconds, sequence number) per record, 32 bytes each
    ...   table    (bytes moved, operation, dtype, name) per row

Who owns which memory. One rank writes a recording; any process may read it at any time, without a lock.
The buffer may be shared memory: then what was written survives SIGKILL and SIGABRT, and
:func:`read_recording` reads it while the writer runs, is frozen or is gone.

Invariants, and what breaks without them:

* The sequence number is the last word of a record. A reader that sees the number sees the rest too;
  otherwise it could report a collective that is half written.
* A reader of a running rank copies the buffer twice and drops the records that the writer may have
  overwritten between the copies. Otherwise it could report records with mixed fields.
* Names are in the table, and a record refers to its row. A record is then one ``pack_into`` of a fixed
  size; with names in the ring, every collective would format and copy text.
* The step from one history to the next is a bijection of the word of the collective. Two ranks whose
  histories were equal and that now call different collectives therefore have different histories.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

from zeroshard.run.recordings import HEADER, MAGIC, VERSION, pid_space

MASK_64 = (1 << 64) - 1
#: Odd multipliers: with equal histories before, words that differ give histories that differ.
MULTIPLIER = 1_000_003
SIZE_MIX = 0x9E37_79B9_7F4A_7C15

_ROWS_USED, STEP, _WAITING = 6, 7, 8
_SECTION = struct.Struct("<64s")
_SECTION_AT = 128
#: A record in the ring. The sequence number is last: a reader that sees it sees the rest too.
SLOT = struct.Struct("<QQdQ")
RING_AT = 256
_ROW = struct.Struct("<Q24s16s80s")
_TABLE_ROWS = 512


class Record(NamedTuple):
    """One collective as one rank called it.

    ``at_s`` is that rank's monotonic clock in seconds; ``history`` is the hash that includes this record.
    """

    seq: int
    op: str
    name: str
    nbytes: int
    dtype: str
    at_s: float = 0.0
    history: int = 0

    @property
    def call(self) -> tuple[str, str, int, str]:
        """Operation, name, bytes and dtype: these must be equal on every rank of the group."""
        return self[1:5]


class FlightRecording(NamedTuple):
    """What a recording says about its rank.

    ``seq``: the number of the newest record. ``waiting``: the number of the collective that the host
    waits in, or 0. ``section``: what the rank does outside collectives. ``records``: the oldest first.
    """

    pid: int
    rank: int
    group_size: int
    seq: int
    step: int
    waiting: int
    section: str
    records: tuple[Record, ...]


def word_of(*words: str) -> int:
    """A 64-bit hash of some words, equal on every rank and in every run.

    >>> word_of("all_gather", "embed") == word_of("all_gather", "embed")
    True
    """
    return int.from_bytes(blake2b("\0".join(words).encode(), digest_size=8).digest(), "little")


def word_with(digest: int, nbytes: int, dtype: str) -> int:
    """The 64-bit word of one collective: ``digest`` is ``word_of(operation, name)``."""
    return (digest ^ (nbytes * SIZE_MIX) ^ word_of(dtype)) & MASK_64


def fold(history: int, record: Record) -> int:
    """The history after one more collective. ``Recorder.enter`` has a copy of this formula."""
    word = word_with(word_of(record.op, record.name), record.nbytes, record.dtype)
    return (history * MULTIPLIER ^ word) & MASK_64


class FlightRecorder:
    """Writes a recording into a zeroed buffer of :meth:`nbytes_for` bytes.

    ``Recorder.enter`` writes the records itself: a call of a method would cost a tenth of a microsecond.
    """

    def __init__(self, buffer: Any, *, ring: int, pid: int, rank: int, group_size: int) -> None:
        self.buffer = buffer
        self.ring = ring
        self.words = memoryview(buffer).cast("B")[: HEADER.size].cast("Q")
        head = (MAGIC, VERSION, pid, rank, group_size, ring, 0, 0, 0, pid_space())
        HEADER.pack_into(buffer, 0, *head)

    @staticmethod
    def nbytes_for(ring: int) -> int:
        """Size of the buffer for a ring of ``ring`` records (a power of two)."""
        return RING_AT + ring * SLOT.size + _TABLE_ROWS * _ROW.size

    def row(self, op: str, name: str, nbytes: int, dtype: str) -> int:
        """A new table row for a call that was not seen before; the last row when the table is full."""
        used = self.words[_ROWS_USED]
        if used == _TABLE_ROWS - 1:
            op, name, nbytes, dtype = "?", "(more names than the log has rows)", 0, "?"
        if used < _TABLE_ROWS:
            at = RING_AT + self.ring * SLOT.size + used * _ROW.size
            _ROW.pack_into(self.buffer, at, nbytes, op.encode(), dtype.encode(), _fit(name))
            self.words[_ROWS_USED] = used + 1
        return min(used, _TABLE_ROWS - 1)

    def mark_waiting(self, seq: int) -> None:
        """Write the number of the collective that the host waits in (0: none)."""
        self.words[_WAITING] = seq

    def section(self, text: str) -> None:
        """Write what the rank does outside collectives, cut to 64 bytes."""
        _SECTION.pack_into(self.buffer, _SECTION_AT, text.encode()[:64])

    def release(self) -> None:
        """Release the buffer, so that its owner can close it."""
        self.words.release()


def read_recording(raw: bytes, later: bytes | None = None) -> FlightRecording | None:
    """The recording in ``raw``; None if these bytes are no recording, or one of another version.

    A writer that runs may overwrite the oldest records while ``raw`` is copied. If ``later`` is a second,
    newer copy, those records are dropped.
    """
    if len(raw) < RING_AT:
        return None
    magic, version, pid, rank, world, ring, used, step, waiting, _ = HEADER.unpack_from(raw)
    if magic != MAGIC or version != VERSION or len(raw) < FlightRecorder.nbytes_for(ring):
        return None
    ring_end = RING_AT + ring * SLOT.size
    slots = sorted(SLOT.iter_unpack(raw[RING_AT:ring_end]), key=lambda slot: slot[3])
    head = slots[-1][3]
    newest = head if later is None else max(s[3] for s in SLOT.iter_unpack(later[RING_AT:ring_end]))
    records: list[Record] = []
    for history, row, at_s, seq in slots:
        # The record with the number newest + 1 may be half written.
        if seq > max(0, newest + 1 - ring) and row < used:
            nbytes, op, dtype, name = _ROW.unpack_from(raw, ring_end + row * _ROW.size)
            op_, name_, dtype_ = _text(op), _text(name), _text(dtype)
            records.append(Record(seq, op_, name_, nbytes, dtype_, at_s, history))
    (section,) = _SECTION.unpack_from(raw, _SECTION_AT)
    return FlightRecording(pid, rank, world, head, step, waiting, _text(section), tuple(records))


def rank_ranges(ranks: Iterable[int], limit: int = 64) -> str:
    """Ranks in short form, in about ``limit`` characters.

    >>> rank_ranges([0, 1, 2, 4]), rank_ranges([3]), rank_ranges([6, 7])
    ('ranks 0-2,4', 'rank 3', 'ranks 6,7')
    >>> rank_ranges(range(0, 200, 2), limit=12)
    'ranks 0,2,4,6,8,10,... (100 in all)'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ""
    for run in runs:
        part = f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run))
        if len(text) + len(part) > limit:
            return f"ranks {text}... ({len(ordered)} in all)"
        text += part + ","
    return ("rank " if len(ordered) == 1 else "ranks ") + text.rstrip(",")


def _fit(name: str) -> bytes:
    """A name in at most 80 bytes. A long one keeps its end, which says more than its start."""
    raw = name.encode()
    return raw if len(raw) <= 80 else b"..." + raw[-77:]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
