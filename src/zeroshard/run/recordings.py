"""The byte layout of a flight recording: the last collectives of a rank, readable after its death.

Without torch, since the launcher reads it too.

[Note: flight recordings] The decision: docs/decisions/0003-tagged-transport.md.

Vocabulary. A *recording* is one buffer with a ring of records and a table of names. A *record* is one
collective as one rank called it. The *history* is a running hash over (operation, name, bytes, dtype) of
every collective so far; equal histories mean equal calls in equal order.

    0     header   magic, version, pid, rank, group size, ring, rows used, step, waiting, namespace
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
* A folder of recordings is removed only if all that is in it is known, and dead. Any program may call a
  folder in ``/dev/shm`` ``zeroshard-...``, and containers that share it may number their processes on
  their own.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from zeroshard.core.files import is_mine

MAGIC = int.from_bytes(b"ZSFLIGHT", "little")
VERSION = 2
HEADER = struct.Struct("<10Q")
"""Magic, version, process, rank, group size, ring, rows used, step, waiting, namespace of processes."""
STACKS = "process.stack"
"""The file beside recordings with the stacks of their process."""


def pid_space() -> int:
    """The namespace of process numbers that this process is in; 0 where there is none.

    Containers that share ``/dev/shm`` may have namespaces of their own.
    """
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def remove_if_ended(folder: Path, has_ended: Callable[[int], bool]) -> None:
    """Remove a folder of recordings whose writers have all ended, as ``has_ended(pid)`` says.

    It must be this user's and no link, and hold recordings of processes of this namespace and their
    stacks, and nothing else.

    Raises:
        OSError: it cannot be read, or another process has removed it.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode) or not is_mine(about):
        return
    files = [*folder.iterdir()]
    if not all(map(_is_own_file, files)):
        return
    writers = [_writer(file) for file in files if file.name != STACKS]
    if writers and all(pid and has_ended(pid) for pid in writers):
        for file in files:
            file.unlink(missing_ok=True)
        folder.rmdir()


def _is_own_file(path: Path) -> bool:
    about = path.lstat()
    return stat.S_ISREG(about.st_mode) and is_mine(about)


def _writer(file: Path) -> int:
    """The process that writes or wrote a recording; 0: not one, of another version, or of elsewhere."""
    with file.open("rb") as opened:
        raw = opened.read(HEADER.size)
    if len(raw) < HEADER.size:
        return 0
    magic, version, pid, *_, space = HEADER.unpack(raw)
    return pid if (magic, version, space) == (MAGIC, VERSION, pid_space()) else 0


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


def _fit(name: str) -> bytes:
    """A name in at most 80 bytes. A long one keeps its end, which says more than its start."""
    raw = name.encode()
    return raw if len(raw) <= 80 else b"..." + raw[-77:]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


PRESENCE = "process"
"""Name of the file that exists as long as a process has a watchdog. Its recordings are in the same
directory."""


def recording_dir(run: str) -> Path:
    """The directory for the recordings of a run, in ``/dev/shm`` if there is one."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"zeroshard-{run}"


def remove_recording(recording: Path) -> None:
    """Remove a recording, and its directory if that is empty then."""
    with contextlib.suppress(OSError):  # gone already, or not empty yet
        recording.unlink(missing_ok=True)
        recording.parent.rmdir()


def sweep_recordings(root: Path | None = None, *, older_than_s: float = 3600.0) -> None:
    """Remove recordings that are older than ``older_than_s`` and whose writers have ended."""
    newest_s = time.time() - older_than_s
    for folder in (root or recording_dir("").parent).glob("zeroshard-*"):
        with contextlib.suppress(OSError):  # another user's, or already removed
            if folder.lstat().st_mtime <= newest_s:
                remove_if_ended(folder, lambda pid: not Path(f"/proc/{pid}").exists())


def read_recording_file(path: Path) -> FlightRecording | None:
    """The recording that another process writes or wrote at ``path``; None if there is none."""
    try:
        return read_recording(path.read_bytes(), path.read_bytes())
    except OSError:
        return None
