"""The manifest of a checkpoint: its schema, and the parser that checks it.

``docs/format.md`` is the specification. The manifest is JSON in a directory that another program may have
written. For any content, :func:`parse` returns a valid :class:`Manifest` or raises a
:class:`CheckpointError`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from zeroshard.checkpoint.boxes import Box, grid_problem, whole
from zeroshard.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "zeroshard checkpoint"
VERSION = 3
"""The newest version that this release reads. A manifest gets the oldest version that can express it."""
VALUE = "value"
"""The tensor that every stored parameter has: its master, or the parameter itself if it has none."""

MAX_NUMEL = 2**53  # integers up to this one are exact in JSON
MAX_NBYTES = 1 << 30  # of the manifest itself
_RESERVED = {"buffer", "tree", "pad"}  # prefixes of the keys of other entries
_FILE = re.compile(r"(?:\.\./frozen-[0-9a-f]{16}/)?[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}\.safetensors")

Dtype = Literal[
    "BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "F16", "BF16",
    "I32", "U32", "F32", "I64", "U64", "F64", "C64",
    "C128",
]  # fmt: skip
DTYPES: dict[Dtype, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "C128": torch.complex128,
}  # fmt: skip
"""torch's dtypes by their names in manifests, which are those of safetensors.

safetensors has no C128: see :func:`stored_as`.
"""
ITEMSIZE: Mapping[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}
"""Bytes of one element, by name of the dtype."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype, *, where: str) -> Dtype:
    """The name of a dtype in files. ``where``: what has it, for the message.

    Raises:
        CheckpointError: files cannot hold this dtype.
    """
    if dtype not in _NAMES:
        raise CheckpointError(
            f"{where} has dtype {dtype}, which the safetensors format does not support."
        )
    return _NAMES[dtype]


def stored_as(dtype: Dtype, shape: tuple[int, ...]) -> tuple[Dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor in a file: safetensors has no complex128, but pairs of F64.

    >>> stored_as("C128", (3,))
    ('F64', (3, 2))
    """
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, shape)


Natural = Annotated[int, Field(ge=0, le=MAX_NUMEL)]
Shape = Annotated[tuple[Natural, ...], Field(max_length=64)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Crc = Annotated[int, Field(ge=0, lt=2**32)]


class SavedFragment(NamedTuple):
    """``numel`` elements of a flat tensor, or of a box in row-major order, from ``begin`` on.

    ``file``: index into ``Manifest.files``.
    """

    file: Natural
    begin: Natural
    numel: Natural


class _Part(BaseModel):
    """A part of the manifest. Unknown keys are ignored; types are not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class SavedFile(_Part):
    """One safetensors file. ``crc32``: one checksum for each block, in order."""

    name: str
    nbytes: Natural
    crc32: tuple[Crc, ...]


class SavedBox(_Part):
    """A box of a tensor in fragments. Together they cover it, without gaps or overlaps."""

    start: Shape
    extent: Shape
    fragments: tuple[SavedFragment, ...]

    @property
    def box(self) -> Box:
        return Box(self.start, self.extent)


class SavedTensor(_Part):
    """A flat tensor in fragments, or its boxes. Together they cover it, without gaps or overlaps.

    ``boxes``: the cells of a grid; empty if ``fragments`` are those of the whole tensor.
    """

    dtype: Dtype
    fragments: tuple[SavedFragment, ...]
    boxes: tuple[SavedBox, ...] = ()

    def parts(self, shape: Sequence[int]) -> list[tuple[Box, tuple[SavedFragment, ...]]]:
        """The boxes with their fragments. Without boxes the whole tensor, of this ``shape``."""
        if not self.boxes:
            return [(whole(shape), self.fragments)]
        return [(box.box, box.fragments) for box in self.boxes]


class Digest(_Part):
    """A checksum of a flat tensor; see :func:`zeroshard.checkpoint.local_state.digest_part`."""

    dtype: Dtype
    sum: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class SavedParameter(_Part):
    """A parameter, and what the optimizer keeps for it.

    ``tensors`` has everything of the parameter's shape: ``value`` and, for Adam, ``exp_avg`` and
    ``exp_avg_sq``. ``scalars`` are single numbers such as ``step``, each with the dtype of its 0-dim
    tensor, or "number" for a Python number. ``aliases``: other names of the same parameter (tied
    weights). ``digest``: checksum of a frozen parameter, also where its bytes are not stored.
    """

    shape: Shape
    trained: bool
    group: Natural | None = None
    aliases: tuple[Name, ...] = ()
    tensors: dict[Name, SavedTensor] = {}
    scalars: dict[Name, tuple[Dtype | Literal["number"], float | int | bool]] = {}
    digest: Digest | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


class SavedBuffer(_Part):
    """A module's buffer. ``files`` has one entry (the same copy for all ranks), or one for each rank."""

    dtype: Dtype
    shape: Shape
    files: Annotated[tuple[Natural, ...], Field(min_length=1)]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Manifest(_Part):
    """All of a checkpoint but the bytes.

    ``shared`` and ``ranks`` are trees as :mod:`zeroshard.checkpoint.json_state` encodes them. Their
    tensors are in ``shared_file`` and ``rank_files``, which are indices into ``files``. ``mesh``: the
    mesh of the run as text, and ``dp_ranks``: the data-parallel rank of each rank. Both are left out if
    every rank had samples of its own.
    """

    tag: Name
    step: Natural
    saved_at: Name
    writer: dict[Name, Name]
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    stage: Annotated[int, Field(ge=0, le=3)]
    block_nbytes: Annotated[int, Field(ge=4096, le=2**30)]
    files: tuple[SavedFile, ...]
    parameters: dict[Name, SavedParameter]
    buffers: dict[Name, SavedBuffer] = {}
    shared: Any = None
    shared_file: Natural = 0
    ranks: tuple[Any, ...] = ()
    rank_files: tuple[Natural, ...] = ()
    mesh: Name | None = None
    dp_ranks: tuple[Natural, ...] = ()

    @property
    def version(self) -> int:
        """The oldest version of the format that has everything that this manifest contains."""
        tensors = [t for p in self.parameters.values() for t in p.tensors.values()]
        dtypes = {tensor.dtype for tensor in tensors} | {b.dtype for b in self.buffers.values()}
        dtypes |= {p.digest.dtype for p in self.parameters.values() if p.digest is not None}
        if "C128" in dtypes:
            return 3
        return 2 if self.mesh is not None or self.dp_ranks or any(t.boxes for t in tensors) else 1

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def dump(self) -> str:
        """The text of ``manifest.json``."""
        body = self.model_dump(mode="json", exclude_defaults=True)
        head = {"format": FORMAT, "version": self.version, "sha256": _sha256(body)}
        return json.dumps({**head, "body": body}, allow_nan=False, separators=(",", ":"))


def _sha256(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, allow_nan=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def fragment_key(fqn: str, tensor: str, begin: int, start: Sequence[int] | None = None) -> str:
    """The name of a fragment in its file. ``start``: of its box; None: it is of the whole tensor.

    >>> fragment_key("layers.0.weight", "exp_avg", 64)
    'exp_avg:64:layers.0.weight'
    >>> fragment_key("layers.0.weight", "exp_avg", 64, (0, 8))
    'exp_avg:64@0,8:layers.0.weight'
    """
    at = "" if start is None else f"@{','.join(map(str, start))}"
    return f"{tensor}:{begin}{at}:{fqn}"


def buffer_key(name: str) -> str:
    """The key of a buffer in its file."""
    return f"buffer:0:{name}"


def tree_key(name: str) -> str:
    """The key, in its file, of a tensor that a tree refers to."""
    return f"tree:0:{name}"


def parse(text: str | bytes, *, where: str | Path) -> Manifest:
    """Read a manifest. ``where`` names it in messages.

    Raises:
        CheckpointError: the text is not a valid manifest. No other exception, for any bytes.
    """
    if len(text) > MAX_NBYTES:
        raise CheckpointError(f"{where} has {len(text):,} bytes; a manifest has at most 2**30.")
    try:
        head = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not readable as JSON: {_shortened(error)}.") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CheckpointError(
            f'{where} is not the manifest of a checkpoint: no "format": "{FORMAT}".'
        )
    version, body = head.get("version"), head.get("body")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise CheckpointError(
            f"{where} has version {_shown(version)}; this release reads 1 to {VERSION}. A newer "
            "release wrote it: install that release, or export the checkpoint with it."
        )
    if not isinstance(body, dict):
        raise CheckpointError(f"{where} has no body.")
    try:
        if head.get("sha256") != _sha256(body):
            raise CheckpointError(f"{where} is damaged: its checksum does not match.")
        found = Manifest.model_validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"{_shortened(step)}." for step in first["loc"]).removesuffix(".")
        what = f"{place}: {_shortened(first['msg'])}".removeprefix(": ")
        raise CheckpointError(f"{where}: {what}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} cannot be read: {_shortened(error)}.") from error
    problem = next(_problems(found), None)
    if problem is None and version < found.version:
        problem = f"it has version {version}, and parts that only version {found.version} has"
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}.")
    return found


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {_shown(twice)} appears {times} times in one object")
    return found


def _shown(value: object) -> str:
    """A value in a message, cut: text that another program wrote may be long."""
    return _shortened(repr(value))


def _shortened(text: object) -> str:
    whole = str(text)
    return whole if len(whole) <= 200 else f"{whole[:200]}..."


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _problems(manifest: Manifest) -> Iterator[str]:
    """Errors that the schema cannot find: references, coverage of tensors, paths, sizes."""
    yield from _file_problems(manifest)
    if not all(_FILE.fullmatch(file.name) for file in manifest.files):
        return
    held = [0] * len(manifest.files)  # bytes of fragments, by file
    yield from _parameter_problems(manifest, held)
    for file, nbytes in zip(manifest.files, held, strict=True):
        if nbytes > file.nbytes:
            yield f"{file.name}: fragments of {nbytes:,} bytes do not fit into its {file.nbytes:,}"
    yield from _rank_problems(manifest)


def _file_problems(manifest: Manifest) -> Iterator[str]:
    """Wrong names, up to the first that is none in the directory, and wrong numbers of checksums."""
    if len({file.name for file in manifest.files}) != len(manifest.files):
        yield "two files have the same name"
    for file in manifest.files:
        if not _FILE.fullmatch(file.name):
            yield f"the file name {_shown(file.name)} is not a name of a file in the directory"
            return
        if len(file.crc32) != -(-file.nbytes // manifest.block_nbytes):
            yield (
                f"{file.name}: {len(file.crc32)} checksums for {file.nbytes:,} bytes in blocks of "
                f"{manifest.block_nbytes:,}"
            )


def _parameter_problems(manifest: Manifest, held: list[int]) -> Iterator[str]:
    """Problems of parameters. Adds the bytes of their fragments to ``held``, by file."""
    taken: set[str] = set()
    for fqn, parameter in manifest.parameters.items():
        for name in (fqn, *parameter.aliases):
            if name in taken:
                yield f"{_shown(name)} names two parameters, or one twice"
            taken.add(name)
        if _extent(parameter.shape) > MAX_NUMEL:
            yield f"{_shown(fqn)} of shape {_shown(list(parameter.shape))} is too large"
        for name, tensor in parameter.tensors.items():
            where = f"{_shown(name)} of {_shown(fqn)}"
            if ":" in name or name in _RESERVED:
                yield f"{where}: no tensor may have this name"
            yield from _box_problems(where, parameter.shape, tensor)
            for box, fragments in tensor.parts(parameter.shape):
                inside = f"{where}, box at {_shown(list(box.start))}" if tensor.boxes else where
                yield from _cover_problems(inside, box.numel, fragments, manifest)
                for file_at, _, numel in fragments:
                    held[file_at] += numel * ITEMSIZE[tensor.dtype]
        for name, (kind, number) in parameter.scalars.items():
            if not _fits(kind, number):
                yield f"{_shown(name)} of {_shown(fqn)}: {_shown(number)} is not a valid {kind}"


def _rank_problems(manifest: Manifest) -> Iterator[str]:
    """Problems of what is saved per rank: buffers, and the state of each rank."""
    num_files = len(manifest.files)
    for name, buffer in manifest.buffers.items():
        if _extent(buffer.shape) > MAX_NUMEL or max(buffer.files) >= num_files:
            yield f"buffer {_shown(name)} is too large, or in no file"
        if len(buffer.files) not in (1, manifest.world_size):
            yield f"buffer {_shown(name)} has {len(buffer.files)} copies for {manifest.world_size} ranks"
    if len(manifest.ranks) != len(manifest.rank_files):
        yield f"{len(manifest.ranks)} ranks have state in {len(manifest.rank_files)} files"
    if len(manifest.ranks) not in (0, manifest.world_size):
        yield f"{len(manifest.ranks)} of {manifest.world_size} ranks have state"
    if (
        any(file >= num_files for file in (manifest.shared_file, *manifest.rank_files))
        and num_files
    ):
        yield "state is in a file that does not exist"
    if manifest.dp_ranks:
        if len(manifest.dp_ranks) != manifest.world_size:
            yield f"{len(manifest.dp_ranks)} data-parallel ranks for {manifest.world_size} ranks"
        seen = set(manifest.dp_ranks)
        if max(seen) >= len(seen):
            yield f"of {len(seen)} data-parallel ranks one has the number {max(seen):,}"


def _box_problems(where: str, shape: Sequence[int], tensor: SavedTensor) -> Iterator[str]:
    if not tensor.boxes:
        return
    if tensor.fragments:
        yield f"{where}: fragments of the whole tensor and of its boxes"
    problem = grid_problem(shape, [box.box for box in tensor.boxes])
    if problem:
        yield f"{where}: {problem}"


def _cover_problems(
    where: str, numel: int, fragments: Sequence[SavedFragment], manifest: Manifest
) -> Iterator[str]:
    at = 0
    for file, begin, length in sorted(fragments, key=lambda f: f.begin):
        if file >= len(manifest.files):
            yield f"{where}: a fragment is in file {file} of {len(manifest.files)}"
            return
        if begin != at or length == 0:
            what = "overlap" if begin < at or length == 0 else "have a gap"
            yield f"{where}: fragments {what} at element {min(begin, at):,}"
            return
        at += length
    if at != numel:
        yield f"{where}: fragments contain {at:,} of {numel:,} elements"


def _extent(shape: Sequence[int]) -> int:
    """The product of the extents, each 0 taken as 1: torch multiplies the other extents too."""
    return prod(max(1, extent) for extent in shape)


def _fits(kind: Dtype | Literal["number"], number: float | int | bool) -> bool:
    """Whether a 0-dim tensor of this dtype, or a Python number, can be made from ``number``."""
    if isinstance(number, bool) or kind == "BOOL":
        return isinstance(number, bool) and kind in ("BOOL", "number")
    if kind != "number" and DTYPES[kind].is_floating_point:
        return abs(number) <= torch.finfo(DTYPES[kind]).max
    if kind == "number" and isinstance(number, float):
        return True
    bits = 64 if kind == "number" else 8 * ITEMSIZE[kind]
    low, high = (0, 2**bits) if kind.startswith("U") else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return isinstance(number, int) and not kind.startswith("C") and low <= number < high
