"""Compares two saved runs by name.

Their world sizes and files may differ. Memory holds one piece of each tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.checkpoint.manifest import DTYPES, SavedParameter
from zeroshard.checkpoint.reader import Source, pieces


@dataclass(frozen=True, slots=True)
class RunDifference:
    """One difference between two runs.

    ``what`` describes it. It is in the tensor, or number, ``part`` of ``name``. ``max_abs``: the largest
    absolute difference of two elements, NaN if one of them is NaN; None where elements cannot be
    compared.
    """

    name: str
    part: str
    what: str
    max_abs: float | None = None


def differences(left: Source, right: Source) -> Iterator[RunDifference]:
    """Names that only one run has, other shapes and dtypes, and values that are not equal bit by bit.

    Parameters with their optimizer state come first, then the buffers of rank 0.

    Raises:
        CheckpointError: values that cannot be read.
    """
    parameters = left.parameters, right.parameters
    yield from _one_sided("", "parameter", *parameters)
    for name in [name for name in parameters[0] if name in parameters[1]]:
        ours, theirs = parameters[0][name], parameters[1][name]
        if ours.shape != theirs.shape:
            shapes = f"shape {list(ours.shape)} and {list(theirs.shape)}"
            yield RunDifference(name, "", shapes)
            continue
        yield from _one_sided(name, "", ours.tensors, theirs.tensors)
        for part in [part for part in ours.tensors if part in theirs.tensors]:
            both = zip(pieces(left, name, part), pieces(right, name, part), strict=True)
            dtype, other = ours.tensors[part].dtype, theirs.tensors[part].dtype
            yield from _values(name, part, DTYPES[dtype], DTYPES[other], both)
        yield from _numbers(name, ours, theirs)
    buffers = left.buffers(0), right.buffers(0)
    yield from _one_sided("", "buffer", *buffers)
    for name in [name for name in buffers[0] if name in buffers[1]]:
        a, b = buffers[0][name], buffers[1][name]
        if a.shape != b.shape:
            yield RunDifference(name, "buffer", f"shape {list(a.shape)} and {list(b.shape)}")
        else:
            pair = (a.reshape(-1), b.reshape(-1))
            yield from _values(name, "buffer", a.dtype, b.dtype, iter([pair]))


def _one_sided(
    name: str, part: str, left: Mapping[str, object], right: Mapping[str, object]
) -> Iterator[RunDifference]:
    for side, ours, theirs in (("first", left, right), ("second", right, left)):
        for key in [key for key in ours if key not in theirs]:
            yield RunDifference(name or key, part or key, f"only in the {side}")


def _values(
    name: str,
    part: str,
    dtype: torch.dtype,
    other: torch.dtype,
    pairs: Iterator[tuple[Tensor, Tensor]],
) -> Iterator[RunDifference]:
    """At most one difference. ``pairs``: flat pieces of both tensors."""
    gaps = [max_abs_difference(a, b) for a, b in pairs]
    found = [gap for gap in gaps if gap is not None]
    words = [] if dtype == other else [f"{dtype} and {other}".replace("torch.", "")]
    if found:
        words.append("values")
    if words:
        largest = float(torch.tensor(found, dtype=torch.float64).max()) if found else 0.0
        yield RunDifference(name, part, ", ".join(words), largest)


def max_abs_difference(a: Tensor, b: Tensor) -> float | None:
    """The largest absolute difference of two elements of flat tensors.

    None if all elements are equal: bit by bit for equal dtypes, by value for different ones.

    >>> max_abs_difference(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
    0.5
    """
    if a.numel() == 0:
        return None
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    one, other = a.to(wide), b.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())  # equal infinities count as the same
    gap = (one - other).abs().masked_fill(same, 0.0)
    largest = float(gap.max())
    return largest if largest or a.dtype == b.dtype else None


def _numbers(name: str, ours: SavedParameter, theirs: SavedParameter) -> Iterator[RunDifference]:
    """Differences of single numbers, such as the step count of a parameter."""
    for key in sorted(ours.scalars.keys() | theirs.scalars.keys()):
        one, other = (p.scalars[key][1] if key in p.scalars else None for p in (ours, theirs))
        if one != other:
            yield RunDifference(name, key, f"{one} and {other}")
    if ours.trained != theirs.trained:
        yield RunDifference(name, "", "trained in one, frozen in the other")
