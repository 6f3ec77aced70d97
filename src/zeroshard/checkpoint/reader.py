"""Reads the values of a saved run by name, in any layout: mesh, number of ranks, stage and set of units.

A reader returns a range of a parameter or of its state, or of a box of it, from the files that its
fragments are in. It reads only the requested bytes, what lies between them, and the blocks around them.
"""

from __future__ import annotations

import os
import stat
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from zeroshard.checkpoint import boxes, json_state
from zeroshard.checkpoint.blocks import (
    BlockFile,
    TensorEntry,
    bytes_of,
    read_entries,
    reading_threads,
)
from zeroshard.checkpoint.boxes import Box, Grid, whole
from zeroshard.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    MAX_NBYTES,
    VALUE,
    Dtype,
    Manifest,
    SavedFragment,
    SavedParameter,
    buffer_key,
    fragment_key,
    parse,
    stored_as,
    tree_key,
)
from zeroshard.core.files import reason
from zeroshard.errors import CheckpointError

PIECE_NUMEL = 1 << 20
"""Elements of a tensor that :func:`pieces` reads at a time."""


class Source(Protocol):
    """A saved run, in ZeroShard's format or in another one."""

    path: Path
    """The directory of the checkpoint."""
    parameters: Mapping[str, SavedParameter]
    """Description of each parameter by name. :meth:`fill` reads the tensors in ``tensors``."""
    mesh: str
    """The mesh of the run that saved; "" if every rank had samples of its own."""
    dp_ranks: Sequence[int]
    """The data-parallel rank of each rank that saved."""
    left_behind: Sequence[str]
    """Descriptions of contents that this library does not load."""

    def fill(self, fqn: str, tensor: str, begin: int, out: Tensor, box: Box | None = None) -> None:
        """Read ``flat[begin : begin + out.numel()]`` of a tensor, or of a box of it, into ``out``.

        ``out`` is 1-D, contiguous, in host memory and of the saved dtype.

        Raises:
            CheckpointError: bytes that cannot be read or are damaged.
        """

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """The modules' persistent buffers as rank ``rank % W`` saved them, for ``W`` saved ranks.

        Buffers of other pipeline stages are among them.
        """

    def shared(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """State that all ranks share. A part that was not saved is missing.

        Keys: ``counters``, ``groups``, ``scaler``, ``scheduler``, ``client_state``.
        """

    def ranks(self) -> Sequence[dict[str, Any]]:
        """State of each saved rank: ``rng``, ``data``. Empty if it was not saved."""

    def probe(self, rank: int) -> None:
        """Read what is small: the buffers of ``rank``, and the tensors of shared state.

        Raises:
            CheckpointError: bytes that cannot be read, or that differ from the saved ones.
        """

    def close(self) -> None:
        """Close all files."""


def full(source: Source, fqn: str, tensor: str = VALUE) -> Tensor:
    """A whole tensor ``[*shape]`` in host memory, of the saved dtype."""
    parameter = source.parameters[fqn]
    saved = parameter.tensors[tensor]
    # The manifest may be wrong: read an element of each fragment before allocating memory for all.
    probe = torch.empty(1, dtype=DTYPES[saved.dtype])
    for box, fragments in saved.parts(parameter.shape):
        for fragment in fragments:
            source.fill(fqn, tensor, fragment.begin, probe, box)
    out = torch.empty(parameter.numel, dtype=DTYPES[saved.dtype])
    source.fill(fqn, tensor, 0, out)
    return out.view(parameter.shape)


def pieces(source: Source, fqn: str, tensor: str = VALUE) -> Iterator[Tensor]:
    """A tensor in flat pieces of ``PIECE_NUMEL`` elements. Each is overwritten by the next."""
    parameter = source.parameters[fqn]
    dtype = DTYPES[parameter.tensors[tensor].dtype]
    memory = torch.empty(min(parameter.numel, PIECE_NUMEL), dtype=dtype)
    for begin in range(0, parameter.numel, PIECE_NUMEL):
        piece = memory[: parameter.numel - begin]
        source.fill(fqn, tensor, begin, piece)
        yield piece


class CheckpointReader:
    """A checkpoint directory in the format of ``docs/format.md``; see :class:`Source`.

    Raises:
        CheckpointError: the manifest is missing or not valid.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.parameters: Mapping[str, SavedParameter] = self.manifest.parameters
        self.mesh = self.manifest.mesh or ""
        self.dp_ranks: Sequence[int] = self.manifest.dp_ranks or range(self.manifest.world_size)
        self.left_behind: Sequence[str] = ()
        self._threads = reading_threads()
        self._open: dict[int, tuple[BlockFile, dict[str, TensorEntry]]] = {}
        self._stored: dict[tuple[str, str], tuple[Grid, list[list[SavedFragment]]]] = {}

    def problems(self, files: Iterable[int] | None = None) -> dict[int, str]:
        """Files that are missing or of another size: index into the manifest's ``files`` -> the reason.

        ``files``: indices to look at; None: all. Opens each file and reads nothing.
        """
        found: dict[int, str] = {}
        for at in sorted(files) if files is not None else range(len(self.manifest.files)):
            try:
                self._block_file(at).close()
            except CheckpointError as error:
                found[at] = str(error)
        return found

    def verify(self) -> list[str]:
        """Read every byte of every file. Returns one text for each file that is damaged."""
        found = []
        for at in range(len(self.manifest.files)):
            try:
                file = self._block_file(at)
            except CheckpointError as error:
                found.append(str(error))
                continue
            try:
                read_entries(file)
                file.check()
            except CheckpointError as error:
                found.append(str(error))
            finally:
                file.close()
        return found

    def fill(self, fqn: str, tensor: str, begin: int, out: Tensor, box: Box | None = None) -> None:
        """See :class:`Source`."""
        grid, _ = self._fragments(fqn, tensor)
        wanted = whole(self.manifest.parameters[fqn].shape) if box is None else box
        index = grid.index_of(wanted)
        if index is not None:
            self._fill(fqn, tensor, index, begin, out)
        else:
            boxes.fill(out, grid, wanted, begin, partial(self._fill, fqn, tensor))

    def _fill(self, fqn: str, tensor: str, index: int, begin: int, out: Tensor) -> None:
        """Read a range of the box ``index`` of the tensor's grid."""
        saved = self.manifest.parameters[fqn].tensors[tensor]
        grid, fragments = self._fragments(fqn, tensor)
        start = grid.boxes[index].start if saved.boxes else None
        memory, itemsize = bytes_of(out), out.element_size()
        at, end = begin, begin + out.numel()
        which = bisect_right(fragments[index], begin, key=_begin) - 1
        while at < end:
            fragment = fragments[index][which]
            stop = min(end, fragment.begin + fragment.numel)
            file, entry = self._entry(
                fragment.file,
                fragment_key(fqn, tensor, fragment.begin, start),
                saved.dtype,
                (fragment.numel,),
            )
            low = (at - begin) * itemsize
            file.read(
                entry.offset + (at - fragment.begin) * itemsize,
                memory[low : low + (stop - at) * itemsize],
            )
            at, which = stop, which + 1

    def buffers(self, rank: int) -> dict[str, Tensor]:
        """See :class:`Source`."""
        found = {}
        for name, buffer in self.manifest.buffers.items():
            file = buffer.files[rank % len(buffer.files)]
            found[name] = self._tensor(file, buffer_key(name), buffer.dtype, buffer.shape)
        return found

    def shared(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """See :class:`Source`."""
        root, file = self.manifest.shared, self.manifest.shared_file
        return self._tree(root, file, "shared", allow_pickle=allow_pickle)

    def ranks(self) -> Sequence[dict[str, Any]]:
        """See :class:`Source`. A rank's file is read when its item is accessed."""
        return _RankStates(self)

    def _tree(
        self, node: Any, file: int, kind: str, *, allow_pickle: bool = False
    ) -> dict[str, Any]:
        tensors = self._tree_tensors(file, kind)
        found = json_state.decode(node, tensors, where=kind, allow_pickle=allow_pickle)
        if not isinstance(found, dict):
            raise CheckpointError(f"{self.path / MANIFEST}: {kind} state is not a dict.")
        return found

    def _tree_tensors(self, file: int, kind: str) -> dict[str, Tensor]:
        if not self.manifest.files:
            return {}
        _, entries = self._file(file)
        prefix = tree_key(f"{kind}/")
        return {
            key.removeprefix(prefix): self._tensor(file, key, entry.dtype, entry.shape)
            for key, entry in entries.items()
            if key.startswith(prefix)
        }

    def probe(self, rank: int) -> None:
        """See :class:`Source`."""
        self._tree_tensors(self.manifest.shared_file, "shared")
        self.buffers(rank)

    def _tensor(self, file: int, key: str, dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
        block_file, entry = self._entry(file, key, dtype, shape)
        out = torch.empty(shape, dtype=DTYPES[dtype])
        block_file.read(entry.offset, bytes_of(out))
        return out

    def _entry(
        self, file: int, key: str, dtype: Dtype, shape: tuple[int, ...]
    ) -> tuple[BlockFile, TensorEntry]:
        block_file, entries = self._file(file)
        entry = entries.get(key)
        dtype, shape = stored_as(dtype, shape)
        if entry is None or (entry.dtype, entry.shape) != (dtype, shape):
            raise CheckpointError(
                f"{block_file.path} does not contain {key!r} as {dtype} {list(shape)}, as the "
                "manifest says: they belong to different saves."
            )
        return block_file, entry

    def _fragments(self, fqn: str, tensor: str) -> tuple[Grid, list[list[SavedFragment]]]:
        """The boxes of a tensor, and the sorted fragments of each."""
        if (fqn, tensor) not in self._stored:
            parameter = self.manifest.parameters[fqn]
            parts = parameter.tensors[tensor].parts(parameter.shape)
            self._stored[fqn, tensor] = (
                Grid([box for box, _ in parts]),
                [sorted(fragments, key=_begin) for _, fragments in parts],
            )
        return self._stored[fqn, tensor]

    def _file(self, at: int) -> tuple[BlockFile, dict[str, TensorEntry]]:
        if at not in self._open:
            file = self._block_file(at)
            try:
                self._open[at] = file, read_entries(file)
            except CheckpointError:
                file.close()
                raise
        return self._open[at]

    def _block_file(self, at: int) -> BlockFile:
        saved = self.manifest.files[at]
        path = self.path / saved.name
        if path.parent.is_symlink() and path.parent != self.path:
            raise CheckpointError(
                f"{path.parent} is a symbolic link. Checkpoints do not contain links."
            )
        return BlockFile(
            path,
            saved.nbytes,
            saved.crc32,
            block_nbytes=self.manifest.block_nbytes,
            threads=self._threads,
        )

    def close(self) -> None:
        """See :class:`Source`."""
        for file, _ in self._open.values():
            file.close()
        self._open.clear()
        self._threads.shutdown()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _begin(fragment: SavedFragment) -> int:
    return fragment.begin


class _RankStates(Sequence[dict[str, Any]]):
    """State of each rank of a checkpoint, read on access."""

    def __init__(self, saved: CheckpointReader) -> None:
        self._saved = saved

    def __len__(self) -> int:
        return len(self._saved.manifest.ranks)

    @overload
    def __getitem__(self, rank: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, rank: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, rank: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(rank, slice):
            return [self[at] for at in range(len(self))[rank]]
        manifest = self._saved.manifest
        return self._saved._tree(manifest.ranks[rank], manifest.rank_files[rank], "rank")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
        CheckpointError: it is missing or not valid.
    """
    text = manifest_bytes(path)
    if not text:
        raise CheckpointError(
            f"{path / MANIFEST} does not exist, or is empty: the save was not completed, or this "
            "is not a checkpoint."
        )
    return parse(text, where=path / MANIFEST)


def manifest_bytes(path: Path) -> bytes:
    """The bytes of the manifest in a checkpoint directory; empty if there is none.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return read_small(path / MANIFEST, MAX_NBYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {reason(error)}.") from error


def read_small(path: Path, max_nbytes: int) -> bytes:
    """The content of a regular file of at most ``max_nbytes``. Does not follow links or wait on pipes.

    Raises:
        OSError: the file cannot be opened or read.
        CheckpointError: it is not a regular file, or it is larger.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_nbytes:
            raise CheckpointError(f"{path} is not a regular file of at most {max_nbytes:,} bytes.")
        with open(fd, "rb", closefd=False) as file:
            return file.read(max_nbytes)
    finally:
        os.close(fd)
