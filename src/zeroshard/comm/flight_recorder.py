"""How is the history of a group's collectives written down, so that it can be read after a death?

A :class:`FlightLog` is a ring of records and a table of names in one buffer. The buffer may be
shared memory: what was written survives SIGKILL and SIGABRT, and :func:`read_flight` reads it from
outside, while its owner is running, frozen or gone. Pure: no torch, no files, no clock of its own.

    0     header   magic, version, pid, rank, world size, ring, rows used, step, waiting
    128   section  what the rank says it is doing outside collectives
    256   ring     (running hash, row, monotonic seconds, sequence number) per record
    ...   table    (bytes moved, operation, dtype, name) per row
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

MASK_64 = (1 << 64) - 1
#: Odd multipliers: folding is a bijection of the word, so two words that differ never meet at once.
MULTIPLIER = 1_000_003
SIZE_MIX = 0x9E37_79B9_7F4A_7C15

_MAGIC = int.from_bytes(b"ZSFLIGHT", "little")
_VERSION = 1
_HEADER = struct.Struct("<9Q")
_ROWS_USED, _STEP, _WAITING = 6, 7, 8
_SECTION = struct.Struct("<64s")
_SECTION_AT = 128
#: A record as the ring keeps it. The sequence number comes last: who sees it sees the rest too.
SLOT = struct.Struct("<QQdQ")
RING_AT = 256
_ROW = struct.Struct("<Q24s16s80s")
_TABLE_ROWS = 512


class Record(NamedTuple):
    """One collective as one rank called it.

    ``at_s`` is that rank's monotonic clock, ``history`` the running hash with this record in it.
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
        """What must be equal on every rank of the group."""
        return self[1:5]


class FlightRecording(NamedTuple):
    """What a log says of its rank."""

    pid: int
    rank: int
    world_size: int
    seq: int
    step: int
    waiting: int
    section: str
    records: tuple[Record, ...]


def word_of(*words: str) -> int:
    """64 bits that stand for some words; equal on every rank and in every run.

    >>> word_of("all_gather", "embed") == word_of("all_gather", "embed")
    True
    """
    return int.from_bytes(blake2b("\0".join(words).encode(), digest_size=8).digest(), "little")


def word_with(digest: int, nbytes: int, dtype: str) -> int:
    """The word of one collective: ``digest`` is ``word_of(operation, name)``."""
    return (digest ^ (nbytes * SIZE_MIX) ^ word_of(dtype)) & MASK_64


def fold(history: int, record: Record) -> int:
    """The running hash after one more collective. ``Recorder.enter`` inlines this formula."""
    word = word_with(word_of(record.op, record.name), record.nbytes, record.dtype)
    return (history * MULTIPLIER ^ word) & MASK_64


class FlightRecorder:
    """The writer's end, over a zeroed buffer of :meth:`nbytes_for` bytes.

    ``Recorder.enter`` writes the slots itself: a call would cost a tenth of a microsecond.
    """

    def __init__(self, buffer: Any, *, ring: int, pid: int, rank: int, world_size: int) -> None:
        self.buffer = buffer
        self.ring = ring
        self._words = memoryview(buffer).cast("B")[: _HEADER.size].cast("Q")
        _HEADER.pack_into(buffer, 0, _MAGIC, _VERSION, pid, rank, world_size, ring, 0, 0, 0)

    @staticmethod
    def nbytes_for(ring: int) -> int:
        """Size of the buffer for a ring of so many records (a power of two)."""
        return RING_AT + ring * SLOT.size + _TABLE_ROWS * _ROW.size

    def row(self, op: str, name: str, nbytes: int, dtype: str) -> int:
        """A table row for a call that was not seen before. When the table is full, the last row."""
        used = self._words[_ROWS_USED]
        if used == _TABLE_ROWS - 1:
            op, name, nbytes, dtype = "?", "(more names than the log has rows)", 0, "?"
        if used < _TABLE_ROWS:
            at = RING_AT + self.ring * SLOT.size + used * _ROW.size
            _ROW.pack_into(self.buffer, at, nbytes, op.encode(), dtype.encode(), _fit(name))
            self._words[_ROWS_USED] = used + 1
        return min(used, _TABLE_ROWS - 1)

    def mark(self, *, step: int | None = None, waiting: int | None = None) -> None:
        """Note the step, or the collective that the host waits in (0: none)."""
        if step is not None:
            self._words[_STEP] = step
        if waiting is not None:
            self._words[_WAITING] = waiting

    def section(self, text: str) -> None:
        """Note what the rank does outside collectives."""
        _SECTION.pack_into(self.buffer, _SECTION_AT, text.encode()[:64])

    def release(self) -> None:
        """Let go of the buffer, so that its owner can close it."""
        self._words.release()


def read_recording(raw: bytes, later: bytes | None = None) -> FlightRecording | None:
    """The state a log was left in; None if these bytes are no log, or one of another version.

    A running owner may overwrite the oldest records while ``raw`` is copied: pass a second copy as
    ``later`` and they are dropped.
    """
    if len(raw) < RING_AT:
        return None
    magic, version, pid, rank, world, ring, used, step, waiting = _HEADER.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION or len(raw) < FlightRecorder.nbytes_for(ring):
        return None
    ring_end = RING_AT + ring * SLOT.size
    slots = sorted(SLOT.iter_unpack(raw[RING_AT:ring_end]), key=lambda slot: slot[3])
    head = slots[-1][3]
    newest = head if later is None else max(s[3] for s in SLOT.iter_unpack(later[RING_AT:ring_end]))
    records: list[Record] = []
    for history, row, at_s, seq in slots:
        # The slot of number newest + 1 may be half written.
        if seq > max(0, newest + 1 - ring) and row < used:
            nbytes, op, dtype, name = _ROW.unpack_from(raw, ring_end + row * _ROW.size)
            op_, name_, dtype_ = _text(op), _text(name), _text(dtype)
            records.append(Record(seq, op_, name_, nbytes, dtype_, at_s, history))
    (section,) = _SECTION.unpack_from(raw, _SECTION_AT)
    return FlightRecording(pid, rank, world, head, step, waiting, _text(section), tuple(records))


def read_recording_pid(raw: bytes) -> int | None:
    """The process that keeps or kept a log; None if these bytes are no log."""
    if len(raw) < _HEADER.size:
        return None
    magic, _, pid, *_ = _HEADER.unpack_from(raw)
    return pid if magic == _MAGIC else None


def rank_ranges(ranks: Iterable[int], limit: int = 64) -> str:
    """Ranks as people write them, in about ``limit`` characters.

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
    """A name in 80 bytes; of a long one the end, which tells more."""
    raw = name.encode()
    return raw if len(raw) <= 80 else b"..." + raw[-77:]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")
