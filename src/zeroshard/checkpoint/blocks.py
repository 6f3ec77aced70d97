"""Writes and reads checkpoint files in blocks with checksums.

A file is written once, from start to end, in blocks. The manifest keeps a CRC-32 of each block. Writes
bypass the page cache where the file system supports it, and need memory for a few aligned buffers. To
read part of a block, all of it is read and checked.

They are safetensors files. That library reads and writes whole files. Here they are written tensor by
tensor into a layout that is known from the start, so that a rank holds a few blocks at a time. Every
tensor starts at a multiple of 64 bytes. Entries named ``pad:`` fill the gaps, because the format allows
none.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import stat
import threading
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, cast

from torch import Tensor

from zeroshard.checkpoint.manifest import ITEMSIZE, Dtype
from zeroshard.core.files import free_nbytes, reason, turn_direct
from zeroshard.errors import CheckpointError, DiskError
from zeroshard.memory.host_memory import NO_FALLOCATE, aligned_bytes, host_access, round_to_page

BLOCK_NBYTES = 4 << 20
WRITE_THREADS = 2
WRITE_BUFFERS = 4
READ_THREADS = 4
ALIGN_NBYTES = 64
_MAX_HEADER_NBYTES = 100 << 20  # the format's limit
_EDGES = 4  # partly read blocks that are kept, because the next fragment begins in them


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory, writable. They keep the tensor alive.

    (``Tensor.numpy()`` would make the storage not resizable, and units free storages by resizing them.)
    """
    assert tensor.device.type == "cpu", tensor.device
    assert tensor.is_contiguous()
    if not tensor.nbytes:
        return memoryview(bytearray())
    host_access(reads=[tensor])
    found = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    found.owner = tensor  # type: ignore[attr-defined]
    return memoryview(found).cast("B")


def write_buffers(
    nbytes: int, *, block_nbytes: int = BLOCK_NBYTES, buffers: int = WRITE_BUFFERS
) -> tuple[int, int]:
    """How many buffers a :class:`BlockWriter` of ``nbytes`` has, and the bytes of each.

    >>> write_buffers(10 << 20), write_buffers(5000)
    ((3, 4194304), (1, 8192))
    """
    blocks = -(-nbytes // block_nbytes)
    return min(max(1, buffers), WRITE_BUFFERS, blocks), round_to_page(min(block_nbytes, nbytes))


def edges_nbytes(nbytes: int, *, block_nbytes: int = BLOCK_NBYTES) -> int:
    """The most bytes that a :class:`BlockFile` of ``nbytes`` keeps of partly read blocks."""
    return min(nbytes, _EDGES * block_nbytes)


class BlockWriter:
    """Writes a new file of exactly ``nbytes``. All blocks are reserved here, so a full disk fails here.

    :meth:`write` takes the bytes in order. :meth:`finish` makes them durable and returns the CRC-32 of
    each block.

    Raises:
        CheckpointError: from every method, with path and reason.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        *,
        block_nbytes: int = BLOCK_NBYTES,
        buffers: int = WRITE_BUFFERS,
    ) -> None:
        self.path = path
        self.nbytes = nbytes
        self._block_nbytes = block_nbytes
        self._crcs = [0] * -(-nbytes // block_nbytes)
        self._failure: OSError | None = None
        self._free: SimpleQueue[tuple[Tensor, memoryview]] = SimpleQueue()
        count, size = write_buffers(nbytes, block_nbytes=block_nbytes, buffers=buffers)
        for _ in range(count):
            buffer = aligned_bytes(size)
            self._free.put((buffer, bytes_of(buffer)))
        self._buffer: tuple[Tensor, memoryview] | None = None
        self._at = 0  # bytes taken so far
        self._fd = -1
        self._jobs: SimpleQueue[tuple[int, tuple[Tensor, memoryview]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o644)
            turn_direct(self._fd)
            _reserve(self._fd, nbytes)
        except OSError as error:
            self.close()
            raise self._error(error) from error
        except DiskError as error:  # the free space cannot be read
            self.close()
            raise CheckpointError(f"{self.path} cannot be written: {error}") from error
        # Plain threads: an executor takes no work while the interpreter shuts down, and saves do.
        for _ in range(min(WRITE_THREADS, len(self._crcs))):
            thread = threading.Thread(target=self._work, name="zeroshard-save")
            thread.start()
            self._threads.append(thread)

    def write(self, data: memoryview) -> None:
        """Take the next bytes. The caller may change them after this returns."""
        assert self._at + len(data) <= self.nbytes, "more bytes than announced"
        done = 0
        while done < len(data):
            if self._buffer is None:
                self._buffer = self._free.get()
            inside = self._at % self._block_nbytes
            part = min(self._block_nbytes - inside, len(data) - done)
            self._buffer[1][inside : inside + part] = data[done : done + part]
            done += part
            self._at += part
            if self._at % self._block_nbytes == 0 or self._at == self.nbytes:
                block = (self._at - 1) // self._block_nbytes
                self._jobs.put((block, self._buffer))
                self._buffer = None
        self._check()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._put(*job)

    def _put(self, block: int, buffer: tuple[Tensor, memoryview]) -> None:
        """On a thread: checksum and write one block. The last one is padded; ``finish`` cuts that off."""
        memory, begin = buffer[1], block * self._block_nbytes
        used = min(self._block_nbytes, self.nbytes - begin)
        try:
            if self._failure is None:
                self._crcs[block] = zlib.crc32(memory[:used])
                written, padded = 0, round_to_page(used)
                while written < padded:
                    written += os.pwrite(self._fd, memory[written:padded], begin + written)
        except OSError as error:
            self._failure = error
        finally:
            self._free.put(buffer)

    def finish(self) -> tuple[int, ...]:
        """Wait until all bytes are on disk. Returns the CRC-32 of each block."""
        assert self._at == self.nbytes, f"{self._at} of {self.nbytes} bytes were written"
        try:
            self._join()
            self._check()
            os.ftruncate(self._fd, self.nbytes)
            os.fsync(self._fd)
        except OSError as error:
            raise self._error(error) from error
        finally:
            self.close()
        return tuple(self._crcs)

    def close(self) -> None:
        """Close the file, finished or not."""
        self._join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _join(self) -> None:
        """Wait until all submitted blocks are written."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _check(self) -> None:
        if self._failure is not None:
            raise self._error(self._failure) from self._failure

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ({self.nbytes:,} bytes) cannot be written: {reason(error)}."
        )


def _reserve(fd: int, nbytes: int) -> None:
    """Reserve blocks if the file system can. Otherwise do nothing: writing zeros would take too long.

    If there is less free space, no block is taken: other programs may still have room.
    """
    if nbytes > free_nbytes(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64(nbytes)
    if nbytes and libc.fallocate(fd, 0, ctypes.c_int64(0), size) != 0:
        number = ctypes.get_errno()
        if number not in NO_FALLOCATE:
            os.ftruncate(fd, 0)  # some file systems keep a partial reservation
            raise OSError(number, os.strerror(number))


class BlockFile:
    """Reads a file that :class:`BlockWriter` wrote.

    Called by one thread at a time. Blocks are read on ``threads``; None: on threads of this object.

    Raises:
        CheckpointError: the file is missing, not a regular file, or not of ``nbytes`` bytes.
    """

    def __init__(
        self,
        path: Path,
        nbytes: int,
        crcs: Sequence[int],
        *,
        block_nbytes: int = BLOCK_NBYTES,
        threads: ThreadPoolExecutor | None = None,
    ) -> None:
        assert len(crcs) == -(-nbytes // block_nbytes)
        self.path = path
        self.nbytes = nbytes
        self._crcs = crcs
        self._block_nbytes = block_nbytes
        self._edges: OrderedDict[int, Future[memoryview]] = OrderedDict()
        self._threads = threads if threads is not None else reading_threads()
        self._owns_threads = threads is None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            self._fd = -1
            self.close()
            raise CheckpointError(f"{path} cannot be opened: {reason(error)}.") from error
        found = os.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
            self.close()
            what = "is not a regular file"
            if stat.S_ISREG(found.st_mode):
                what = (
                    f"has {found.st_size:,} bytes instead of {nbytes:,}: it was truncated or "
                    "replaced"
                )
            raise CheckpointError(f"{path} {what}.")

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes from ``offset`` on, after checking their blocks.

        Raises:
            CheckpointError: bytes outside of the file, a failed read, or a wrong checksum.
        """
        end, step = offset + len(memory), self._block_nbytes
        if not 0 <= offset <= end <= self.nbytes:
            raise CheckpointError(
                f"{self.path}: bytes {offset:,} to {end:,} are outside of its {self.nbytes:,}."
            )
        inner: list[Future[None]] = []
        edges: list[tuple[Future[memoryview], slice, memoryview]] = []
        for block in range(offset // step, -(-end // step)):
            begin, stop = block * step, min(block * step + step, self.nbytes)
            low, high = max(begin, offset), min(stop, end)
            target = memory[low - offset : high - offset]
            if (low, high) == (begin, stop) and block not in self._edges:
                inner.append(self._threads.submit(self._read_block, block, target))
            else:
                edges.append((self._edge(block), slice(low - begin, high - begin), target))
        # Wait for all of them, also after an error: they use the caller's memory and the open file.
        begun: list[Future[Any]] = [*inner, *(edge for edge, _, _ in edges)]
        wait(begun)
        for future in inner:
            future.result()
        for edge, part, target in edges:
            target[:] = edge.result()[part]

    def check(self) -> None:
        """Read and check the whole file.

        Raises:
            CheckpointError: a failed read or a wrong checksum.
        """
        scratch = bytearray(min(self.nbytes, READ_THREADS * self._block_nbytes))
        for offset in range(0, self.nbytes, max(1, len(scratch))):
            self.read(offset, memoryview(scratch)[: self.nbytes - offset])

    def _edge(self, block: int) -> Future[memoryview]:
        """A block that is wanted in part. It is kept: the next fragment needs the rest."""
        if block not in self._edges:
            self._edges[block] = self._threads.submit(self._read_edge, block)
            if len(self._edges) > _EDGES:
                self._edges.popitem(last=False)
        self._edges.move_to_end(block)
        return self._edges[block]

    def _read_edge(self, block: int) -> memoryview:
        begin = block * self._block_nbytes
        memory = memoryview(bytearray(min(self._block_nbytes, self.nbytes - begin)))
        self._read_block(block, memory)
        return memory

    def _read_block(self, block: int, memory: memoryview) -> None:
        begin, done = block * self._block_nbytes, 0
        while done < len(memory):
            try:
                got = os.preadv(self._fd, [memory[done:]], begin + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path} cannot be read at byte {begin + done:,}: {reason(error)}."
                ) from error
            if not got:
                raise CheckpointError(
                    f"{self.path} ends at byte {begin + done:,}: it was truncated."
                )
            done += got
        if zlib.crc32(memory) != self._crcs[block]:
            raise CheckpointError(
                f"{self.path} is damaged between bytes {begin:,} and {begin + len(memory):,}: "
                "their checksum differs from the saved one."
            )

    def close(self) -> None:
        """Close the file, and end the threads if they are this object's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._edges.clear()
        if self._owns_threads:
            self._threads.shutdown()


def reading_threads() -> ThreadPoolExecutor:
    """Threads for :class:`BlockFile`. They start on first use. The caller shuts them down."""
    return ThreadPoolExecutor(READ_THREADS, "zeroshard-load")


# ---------------------------------------------------------------------- entries


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: ``file[offset : offset + nbytes]``."""

    key: str
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int = 0  # from the start of the file
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", prod(self.shape) * ITEMSIZE[self.dtype])


def lay_out(entries: Iterable[TensorEntry]) -> tuple[bytes, list[TensorEntry]]:
    """The header of a file, and the entries with their offsets in the order of the file.

    Raises:
        CheckpointError: two entries have the same key, or the header exceeds the format's limit.
    """
    placed: list[TensorEntry] = []
    at = 0
    for entry in entries:
        gap = -at % ALIGN_NBYTES
        if gap:
            placed.append(TensorEntry(f"pad:{len(placed)}", "U8", (gap,), at))
            at += gap
        placed.append(TensorEntry(entry.key, entry.dtype, entry.shape, at))
        at += entry.nbytes
    table = {
        e.key: {"dtype": e.dtype, "shape": e.shape, "data_offsets": [e.offset, e.offset + e.nbytes]}
        for e in placed
    }
    if len(table) != len(placed):
        raise CheckpointError("two tensors of one checkpoint file have the same name.")
    head = head_of(table)
    if len(head) - 8 > _MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{len(placed):,} tensors in one file: its header would have {len(head) - 8:,} bytes, more "
            "than the safetensors format allows. Save with more ranks, or larger units."
        )
    return head, [TensorEntry(e.key, e.dtype, e.shape, e.offset + len(head)) for e in placed]


def head_of(table: Mapping[str, Any]) -> bytes:
    """What precedes the tensors of a safetensors file: the length of the table, and the table, padded."""
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_NBYTES)
    return len(text).to_bytes(8, "little") + text


def read_entries(file: BlockFile) -> dict[str, TensorEntry]:
    """The tensors of a file by key.

    Raises:
        CheckpointError: the file is not a valid safetensors file.
    """
    try:
        head = bytearray(8)
        file.read(0, memoryview(head))
        length = int.from_bytes(head, "little")
        if length > min(_MAX_HEADER_NBYTES, file.nbytes - 8):
            raise ValueError(f"its header would have {length:,} bytes")
        text = bytearray(length)
        file.read(8, memoryview(text))
        table = json.loads(bytes(text))
        table.pop("__metadata__", None)
        found = {key: _entry(key, row, 8 + length) for key, row in table.items()}
        at = 8 + length
        for entry in sorted(found.values(), key=lambda e: (e.offset, e.nbytes)):
            if entry.offset != at:
                raise ValueError(f"tensors have a gap or overlap at byte {min(at, entry.offset):,}")
            at += entry.nbytes
        if at != file.nbytes:
            raise ValueError(f"its tensors end at byte {at:,}")
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise CheckpointError(
            f"{file.path} is not a safetensors file of {file.nbytes:,} bytes: {str(error)[:200]}."
        ) from error
    return found


def _entry(key: str, row: Mapping[str, object], begin: int) -> TensorEntry:
    dtype, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    name = repr(key[:80])
    if not isinstance(shape, list) or not isinstance(offsets, list) or not isinstance(dtype, str):
        raise ValueError(f"{name} is not described")
    low, high = offsets
    if len(shape) > 64 or not all(type(n) is int and 0 <= n <= 2**53 for n in (*shape, low, high)):
        raise ValueError(f"{name} has an invalid shape or offset")
    if prod(max(1, n) for n in shape) > 2**53:  # torch multiplies the others even if one is 0
        raise ValueError(f"{name} is too large")
    if dtype not in ITEMSIZE or dtype == "C128" or prod(shape) * ITEMSIZE[dtype] != high - low:
        raise ValueError(f"{name} of {dtype[:20]} {shape} does not have {high - low} bytes")
    return TensorEntry(key, cast("Dtype", dtype), tuple(shape), begin + low)
