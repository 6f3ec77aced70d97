"""Lays out and reads the headers of safetensors files.

The safetensors library reads and writes whole files. Checkpoint files are written tensor by tensor into a
layout that is known from the start, so that a rank holds a few blocks at a time. Every tensor starts at a
multiple of 64 bytes. Entries named ``pad:`` fill the gaps, because the format allows none.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch

from zeroshard.checkpoint.blocks import BlockFile
from zeroshard.checkpoint.manifest import ITEMSIZE, Dtype
from zeroshard.errors import CheckpointError

ALIGN_NBYTES = 64
_MAX_HEADER_NBYTES = 100 << 20  # the format's limit

DTYPES: dict[Dtype, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
    "C128": torch.complex128,
}  # fmt: skip
"""torch's dtypes by their names in manifests."""
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
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN_NBYTES)
    if len(text) > _MAX_HEADER_NBYTES:
        raise CheckpointError(
            f"{len(placed):,} tensors in one file: its header would have {len(text):,} bytes, more "
            "than the safetensors format allows. Save with more ranks, or larger units."
        )
    head = len(text).to_bytes(8, "little") + text
    return head, [TensorEntry(e.key, e.dtype, e.shape, e.offset + len(head)) for e in placed]


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
