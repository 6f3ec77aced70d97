"""Plans an export: which tensors are in which file, at which offset, and in which dtype.

Pure functions: every rank makes the same plan.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from zeroshard.checkpoint.blocks import head_of
from zeroshard.checkpoint.manifest import dtype_name
from zeroshard.errors import CheckpointError, UsageError

SAFETENSORS = "model.safetensors"
MAX_SHARD_SIZE = "5GB"

_UNITS = {"": 1, "B": 1, **{f"{c}B": 1000 ** (i + 1) for i, c in enumerate("KMGT")}}
_UNITS |= {f"{c}IB": 1024 ** (i + 1) for i, c in enumerate("KMGT")}
_EXPORT_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32,
    "float16": torch.float16, "fp16": torch.float16,
    "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip


def parse_size(size: int | str | None) -> int | None:
    """Bytes from ``"5GB"`` (decimal), ``"5GiB"`` (binary) or a number. None: no limit.

    Raises:
        UsageError: it is no size, or less than one byte.

    >>> parse_size("5GB"), parse_size("1.5 kib"), parse_size(7)
    (5000000000, 1536, 7)
    """
    if size is None:
        return None
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if isinstance(size, bool) or not found or found[2].upper() not in _UNITS:
        raise UsageError(
            f'max_shard_size={size!r} is not a size: give a number of bytes, or a text like "5GB".'
        )
    nbytes = int(float(found[1]) * _UNITS[found[2].upper()])
    if nbytes < 1:
        raise UsageError(f"max_shard_size={size!r}: files cannot be so small.")
    return nbytes


def parse_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype that weights can be converted to. None: each weight keeps its own.

    Raises:
        UsageError: it is another dtype, or none.
    """
    if dtype is None or dtype in _EXPORT_DTYPES.values():
        return dtype  # type: ignore[return-value]
    if dtype not in _EXPORT_DTYPES:
        raise UsageError(
            f"dtype={dtype!r}: weights are exported as float32, float16 or bfloat16, or in their "
            "own dtype (None)."
        )
    return _EXPORT_DTYPES[str(dtype)]


def written_dtype(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is written. Integers and 8-bit floats (which need a scale) are kept."""
    return wanted if wanted is not None and own.is_floating_point and own.itemsize > 1 else own


def loaded_name(names: Sequence[str], tied: Iterable[str]) -> str:
    """The name under which Hugging Face loads a tied weight; it ties the other names to that one.

    ``tied``: names, or patterns of names, that may be missing in the files. The first name that matches
    none of them is taken, else the first name.

    >>> loaded_name(["head", "wte"], ["head"])
    'wte'
    """
    found = (n for n in names if not any(re.search(pattern, n) for pattern in tied))
    return next(found, names[0])


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor as it is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of an export; ``weights`` in the order in which they are written."""

    file: str
    weights: tuple[Weight, ...]

    @property
    def weights_nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


def plan_shards(
    weights: Iterable[Weight], *, filename: str = SAFETENSORS, max_nbytes: int | None
) -> list[Shard]:
    """Cut a sequence of weights into files of at most ``max_nbytes``. A larger tensor has its own file.

    >>> w = [Weight(n, torch.float32, (2,)) for n in "abc"]
    >>> [(s.file, len(s.weights)) for s in plan_shards(w, max_nbytes=16)]
    [('model-00001-of-00002.safetensors', 2), ('model-00002-of-00002.safetensors', 1)]

    Raises:
        CheckpointError: a safetensors file cannot hold a weight.
    """
    stem, suffix = os.path.splitext(filename)
    runs: list[list[Weight]] = [[]]
    nbytes = 0
    for weight in weights:
        if weight.dtype == torch.complex128 and suffix == ".safetensors":
            raise CheckpointError(
                f"{weight.name!r} is complex128, which the safetensors format does not have. Write a "
                "file with torch.save instead: save_16bit_model(directory, 'pytorch_model.bin'), or "
                "zero_to_fp32.py without --safe_serialization."
            )
        if max_nbytes is not None and runs[-1] and nbytes + weight.nbytes > max_nbytes:
            runs.append([])
            nbytes = 0
        runs[-1].append(weight)
        nbytes += weight.nbytes
    if len(runs) == 1:
        return [Shard(filename, tuple(runs[0]))]
    return [
        Shard(f"{stem}-{i:05}-of-{len(runs):05}{suffix}", tuple(run))
        for i, run in enumerate(runs, start=1)
    ]


def index_of(shards: Sequence[Shard]) -> str:
    """The JSON text of the index, which names each tensor's file."""
    where = {weight.name: shard.file for shard in shards for weight in shard.weights}
    total = sum(shard.weights_nbytes for shard in shards)
    body = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(body, indent=2) + "\n"


def file_layout(shard: Shard) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and each tensor's offset in the file in bytes.

    Wide elements come first: so every tensor is aligned to its elements, and there are no gaps.

    Raises:
        CheckpointError: two tensors have the same name.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for weight in sorted(shard.weights, key=lambda w: -w.dtype.itemsize):
        if weight.name in table:
            raise CheckpointError(f"two tensors of the export are called {weight.name!r}.")
        table[weight.name] = {
            "dtype": dtype_name(weight.dtype, where=repr(weight.name)),
            "shape": weight.shape,
            "data_offsets": [at, at + weight.nbytes],
        }
        begins[weight.name] = at
        at += weight.nbytes
    head = head_of(table)
    return head, {name: begin + len(head) for name, begin in begins.items()}
