"""Writes weights as files that other libraries load: those of safetensors, verified, and those of torch.

Tensors are written one after the other, in pieces, at places that are known from the start. Files have
temporary names until the safetensors library has read every tensor back and its checksum equals that of
the bytes that were to be written. Until then the files of an earlier export are untouched.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from zeroshard.checkpoint.blocks import bytes_of
from zeroshard.checkpoint.directory import sync_directory, write_durably
from zeroshard.checkpoint.export_plan import (
    MAX_SHARD_SIZE,
    SAFETENSORS,
    Shard,
    Weight,
    file_layout,
    index_of,
    parse_size,
    plan_shards,
)
from zeroshard.checkpoint.manifest import MANIFEST, dtype_name
from zeroshard.core.files import free_nbytes, reason
from zeroshard.errors import CheckpointError
from zeroshard.memory.host_memory import allocate

_log = logging.getLogger("zeroshard")

PIECE_NBYTES = 16 << 20
"""Bytes that are converted and written at a time."""
_MAPPED_NBYTES = 64 << 20  # what the library has read stays mapped until the file is reopened
PART = ".part"

Progress = Callable[[int, int], None]
"""Called with the bytes done and all bytes. A byte counts twice: when written and when read back."""


# ---------------------------------------------------------------------- writing


def pieces_of(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a tensor on any device, as flat pieces of at most ``PIECE_NBYTES`` bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    yield from flat.split(max(1, PIECE_NBYTES // flat.element_size()))


class Exporter:
    """Writes the files of one export into ``directory``, which is created.

    :meth:`put` takes the weights in their order; :meth:`finish` renames the files. Host memory: a few
    pieces, and the names.

    Raises:
        CheckpointError: from every method: the disk is full, a file cannot be written, or it is read back
            different.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        directory: str | Path,
        *,
        filename: str = SAFETENSORS,
        max_shard_size: int | str | None = MAX_SHARD_SIZE,
        progress: Progress = lambda _done, _total: None,
    ) -> None:
        self.directory = Path(directory)
        self.filename = filename
        self.shards = plan_shards(weights, filename=filename, max_nbytes=parse_size(max_shard_size))
        self._progress = progress
        self._done_nbytes = 0
        self._waiting = iter(self.shards)
        self._file: _ShardFile | None = None
        layouts_nbytes = sum(len(file_layout(s)[0]) + s.weights_nbytes for s in self.shards)
        self._hold = prepare(self.directory, filename, layouts_nbytes)

    def put(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Write the next tensor of the plan: flat pieces in order, of its dtype, on any device."""
        if self._file is None:
            self._file = self._open()
        self._file.put(name, pieces, self._note)
        if self._file.complete:
            self._close_shard()

    def _open(self) -> _ShardFile:
        shard = next(self._waiting)
        return _ShardFile(self.directory / (shard.file + PART), shard)

    def _close_shard(self) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        with closing(file):
            file.sync()
        verify(file.path, file.shard, file.crcs, self._note)

    def _note(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        self._progress(self._done_nbytes, 2 * sum(shard.weights_nbytes for shard in self.shards))

    def finish(self) -> list[Path]:
        """Give the verified files their names, the index last. Returns the paths of the weights."""
        if not self.shards[0].weights:
            self._file = self._open()
            self._close_shard()
        assert self._file is None, "weights are missing"
        assert next(self._waiting, None) is None, "weights are missing"
        return put_in_place(self.directory, self.filename, self.shards)

    def close(self) -> None:
        """Remove the files that :meth:`finish` did not rename."""
        if self._file is not None:
            self._file.close()
        for shard in self.shards:
            with suppress(OSError):  # left by a failure that was raised already
                (self.directory / (shard.file + PART)).unlink(missing_ok=True)
        self._hold.close()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ShardFile:
    """One file under its temporary name. ``put`` takes tensors in the shard's order."""

    def __init__(self, path: Path, shard: Shard) -> None:
        self.path = path
        self.shard = shard
        self.crcs: dict[str, int] = {}
        self._head, self._begins = file_layout(shard)
        self._nbytes = len(self._head) + shard.weights_nbytes
        self._waiting = iter(shard.weights)
        self._fd = -1
        try:
            flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_NOFOLLOW
            self._fd = os.open(path, flags, 0o666)
            allocate(self._fd, 0, self._nbytes)
        except OSError as error:
            self.close()
            raise self._error(error) from error

    @property
    def complete(self) -> bool:
        return len(self.crcs) == len(self.shard.weights)

    def put(self, name: str, pieces: Iterable[Tensor], note: Callable[[int], None]) -> None:
        weight = next(self._waiting)
        assert weight.name == name, f"{name!r} came instead of {weight.name!r}"
        begin = at = self._begins[name]
        crc = 0
        for piece in pieces:
            here = converted(piece, weight.dtype, name=name).cpu().contiguous()
            data = bytes_of(here)
            assert at + len(data) <= begin + weight.nbytes, (
                f"{name!r} has more bytes than announced"
            )
            crc = zlib.crc32(data, crc)
            self._write(data, at)
            at += len(data)
            note(len(data))
        assert at == begin + weight.nbytes, f"{name!r} has fewer bytes than announced"
        self.crcs[name] = crc

    def _write(self, data: memoryview, at: int) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
        except OSError as error:
            raise self._error(error) from error

    def sync(self) -> None:
        """Wait until all bytes are on disk. They leave the page cache, so that a check reads the disk."""
        self._write(memoryview(self._head), 0)
        try:
            os.fsync(self._fd)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _error(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} ({self._nbytes:,} bytes) cannot be written: {reason(error)}."
        )


def converted(piece: Tensor, dtype: torch.dtype, *, name: str) -> Tensor:
    """``piece`` in ``dtype``, rounded to nearest, ties to even.

    Raises:
        CheckpointError: a finite value would become infinite.
    """
    if piece.dtype == dtype:
        return piece
    out = piece.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(piece.dtype).max and out.isinf().any():
        lost = piece[out.isinf() & piece.isfinite()]
        if lost.numel():
            raise CheckpointError(
                f"{name!r} has the value {float(lost[0]):g}, which "
                f"{str(dtype).removeprefix('torch.')} cannot represent (at most "
                f"{torch.finfo(dtype).max:g}). Export as "
                f"float32{' or bfloat16' if dtype == torch.float16 else ''}."
            )
    return out


class Hold:
    """An exclusive lock on a directory, which must exist, for writing exports into it.

    Another process or thread waits for the lock, and logs one line. :meth:`close`, or the end of the
    process, releases it. On a file system without locks nothing is locked.
    """

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info(
                "another export into %s is running: this one waits until it has ended", directory
            )
            fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError:
            self.close()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def prepare(directory: Path, filename: str, nbytes: int) -> Hold:
    """Create and lock the directory, remove what an interrupted export left, and check for free space.

    Raises:
        CheckpointError: the directory is a checkpoint, cannot be written, or lacks ``nbytes`` of free
            space.
    """
    if (directory / MANIFEST).exists():
        raise CheckpointError(
            f"{directory} is a checkpoint: an export there could replace its files. Give another "
            "directory."
        )
    stem, suffix = os.path.splitext(filename)
    hold = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        hold = Hold(directory)
        for left in directory.glob(f"{glob_text(stem)}*{suffix}{PART}"):
            left.unlink(missing_ok=True)
        free = free_nbytes(directory)
    except OSError as error:
        if hold is not None:
            hold.close()
        raise CheckpointError(f"{directory} cannot be written: {reason(error)}.") from error
    if nbytes > free:
        hold.close()
        raise CheckpointError(
            f"the export needs {nbytes:,} bytes, and {directory} has {free:,} free: nothing was "
            "written. Free some space, or choose a smaller dtype."
        )
    return hold


def glob_text(text: str) -> str:
    """A glob pattern that matches only this text."""
    return re.sub(r"([*?\[])", r"[\1]", text)


def put_in_place(directory: Path, filename: str, shards: Sequence[Shard]) -> list[Path]:
    """Rename complete files, the index last, and remove the files of an earlier export.

    One file replaces another atomically. While several are renamed there is no index: a reader then finds
    no export, and never a mixture of two.

    Raises:
        CheckpointError: a rename failed; the directory may hold an incomplete export.
    """
    stem, suffix = os.path.splitext(filename)
    index = directory / f"{filename}.index.json"
    wanted = [directory / shard.file for shard in shards]
    shard_name = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(suffix)}")
    try:
        if len(shards) > 1:
            index.unlink(missing_ok=True)
            (directory / filename).unlink(missing_ok=True)  # loaders prefer it to an index
        for path in wanted:
            os.replace(path.with_name(path.name + PART), path)
        if len(shards) > 1:
            sync_directory(directory)
            write_durably(index, index_of(shards))
        else:
            index.unlink(missing_ok=True)
        for path in directory.iterdir():
            if shard_name.fullmatch(path.name) and path not in wanted:
                path.unlink(missing_ok=True)
        sync_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"the files of the export cannot be moved into {directory}: {reason(error)}. The "
            "export there may be incomplete: export again."
        ) from error
    return wanted


# ---------------------------------------------------------------------- reading back


def verify(
    path: Path,
    shard: Shard,
    crcs: dict[str, int],
    note: Callable[[int], None] = lambda _nbytes: None,
) -> None:
    """Check that the safetensors library reads exactly these tensors, with the bytes that were written.

    ``crcs``: CRC-32 of each tensor by name.

    Raises:
        CheckpointError: the file cannot be read, or holds other tensors or bytes.
    """
    found = dict.fromkeys(crcs, 0)
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            shapes = {n: (s.get_shape(), s.get_dtype()) for n in names for s in [file.get_slice(n)]}
        meant = {w.name: (list(w.shape), dtype_name(w.dtype, where=w.name)) for w in shard.weights}
        if shapes != meant:
            odd = sorted(name for name in shapes | meant if shapes.get(name) != meant.get(name))
            raise CheckpointError(f"{path} does not contain {odd[0]!r} as it was written.")
        for parts in _readable_parts(shard.weights):
            with safe_open(path, framework="pt") as file:
                for weight, rows in parts:
                    if rows is None:
                        part = file.get_tensor(weight.name)
                    else:
                        part = file.get_slice(weight.name)[rows].contiguous()
                    found[weight.name] = zlib.crc32(bytes_of(part), found[weight.name])
                    note(part.nbytes)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read back: {error}.") from error
    wrong = [name for name in crcs if found[name] != crcs[name]]
    if wrong:
        raise CheckpointError(
            f"{path}: the disk returned other bytes than were written, for "
            f"{wrong[0]!r}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}. Do not trust "
            "this disk."
        )


def _readable_parts(weights: Sequence[Weight]) -> Iterator[list[tuple[Weight, slice | None]]]:
    """All rows of all weights, in lists; each list is read through one mapping of the file."""
    batch: list[tuple[Weight, slice | None]] = []
    nbytes = 0
    for weight in weights:
        rows = weight.shape[0] if weight.shape and weight.nbytes > PIECE_NBYTES else 1
        step = max(1, PIECE_NBYTES * rows // max(1, weight.nbytes))
        for low in range(0, rows, step):
            batch.append((weight, slice(low, min(low + step, rows)) if rows > 1 else None))
            nbytes += weight.nbytes * step // rows
            if nbytes >= _MAPPED_NBYTES:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


# ---------------------------------------------------------------------- files of torch.save


def write_bins(
    shards: Sequence[Shard],
    directory: str | Path,
    *,
    filename: str,
    read: Callable[[str], Tensor],
) -> list[Path]:
    """Write files with ``torch.save`` that ``weights_only=True`` can load. Returns their paths.

    ``read(name)`` returns a weight ``[*shape]`` in host memory. One file at a time is in memory. Files
    get their names when all are complete.

    Raises:
        CheckpointError: a file cannot be written.
    """
    directory = Path(directory)
    hold = prepare(directory, filename, sum(shard.weights_nbytes for shard in shards))
    parts = [directory / (shard.file + PART) for shard in shards]
    try:
        for shard, part in zip(shards, parts, strict=True):
            _save(part, {weight.name: read(weight.name) for weight in shard.weights})
        return put_in_place(directory, filename, shards)
    finally:
        for part in parts:
            with suppress(OSError):  # left by a failure that was raised already
                part.unlink(missing_ok=True)
        hold.close()


def _save(path: Path, state: dict[str, Tensor]) -> None:
    try:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer turns an OSError into a RuntimeError
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"{path} cannot be written: {text}.") from error
