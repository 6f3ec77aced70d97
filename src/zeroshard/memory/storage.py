"""Allocates and releases the memory of a flat tensor in place.

[Note: why storages are resized] Autograd saves *views* of parameters (``F.linear`` saves ``weight.t()``),
not the parameters. If a parameter were given another tensor between forward and backward, these views
would keep the old values without an error. So every unit owns one storage as long as it lives. Parameters
are views of it. Releasing or allocating it changes its size and never its identity (ADR 0002).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

resize_listeners: list[Callable[[Tensor], None]] = []
"""Called after a storage changed its size, with the flat tensor of it. Empty in production."""


def resize(flat: Tensor, nbytes: int) -> None:
    """Give the storage of ``flat`` ``nbytes`` of memory. What is new has undefined contents."""
    flat.untyped_storage().resize_(nbytes)
    for listener in resize_listeners:
        listener(flat)


def allocate(flat: Tensor) -> None:
    """Give the storage of ``flat`` memory again. The contents are undefined."""
    if flat.untyped_storage().size() == 0:
        resize(flat, flat.nbytes)


def release(flat: Tensor) -> None:
    """Free the memory of ``flat`` and all its views. They must not be read until :func:`allocate`."""
    resize(flat, 0)


uses: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and others hold the storage that is at an address (``UntypedStorage._cdata``)."""


_PATIENCE_S = 5e-4


def has_more_uses(address: int, expected: int) -> bool:
    """Whether more than ``expected`` hold a storage, and not only for a moment.

    A thread of a transport lets go of the tensors of a collective a little after it has ended.
    """
    until = 0.0
    while uses(address) > expected:
        now = time.monotonic()
        until = until or now + _PATIENCE_S
        if now > until:
            return True
        time.sleep(_PATIENCE_S / 10)
    return False


_ROWS = _COLUMNS = 2**12
"""The words of a fingerprint are summed by rows and by columns of a matrix of at most this size."""

WEIGHTS_NBYTES = 8 * (2 * _COLUMNS + _ROWS)
"""Memory on the device that fingerprints need. Who takes many keeps :func:`weights_for`."""

WEIGHTS_OWNER = "weights of fingerprints"
"""The owner of that memory in a ledger."""


def fingerprint(flat: Tensor) -> Tensor:
    """A 0-dim int64 that changes if one word of ``flat`` changes, or if words change places.

    Reads the memory twice, in five kernels per 128 MiB, and does not wait for the device. ``flat`` has a
    multiple of 8 bytes.
    """
    weights = weights_for(flat)
    total: Tensor | None = None
    for piece in flat.view(torch.int64).split(_ROWS * _COLUMNS):
        rows = len(piece) // _COLUMNS
        rest = sums = piece[rows * _COLUMNS :]
        if rows:
            matrix = piece[: rows * _COLUMNS].view(rows, _COLUMNS)
            sums = torch.cat([rest, matrix.sum(0), matrix.sum(1)])
        begin = _COLUMNS - len(rest)
        part = (sums * weights[begin : begin + len(sums)]).sum()
        total = part if total is None else 3 * total + part
    assert total is not None
    return total


def _make_weights() -> Tensor:
    """The weights of the words after the last row, of the columns and of the rows.

    The weight of a word in the matrix is the sum of its row's, which is even, and its column's, which is
    odd. So every word has an odd weight, and a change of one word always changes the sum.
    """
    weights = torch.arange(1, 2 * (2 * _COLUMNS + _ROWS), 2, device="cpu") * 0x1E3779B97F4A7C15 | 1
    weights[2 * _COLUMNS :] *= 2 * 0x2545F4914F6CDD1D
    return weights


_weights: weakref.WeakValueDictionary[tuple[int, torch.device], Tensor]
_weights = weakref.WeakValueDictionary()  # by simulation (0: none) and device


def weights_for(flat: Tensor) -> Tensor:
    """The weights of fingerprints on the device of ``flat``: they exist as long as a caller keeps them.

    The copy waits for the device, once, so every stream may read them.
    """
    key = id(flat.fake_mode) if isinstance(flat, FakeTensor) else 0, flat.device
    weights = _weights.get(key)
    if weights is None or weights.device != flat.device:  # a device may have been a pretended one
        _weights[key] = weights = _make_weights().to(flat.device)
    return weights


def join_into(flat_N: Tensor, parts: Sequence[Tensor]) -> bool:
    """Copy ``parts`` into the beginning of ``flat_N``, one after the other, by one kernel.

    False: their dtypes or places in memory do not allow it.
    """
    dtype, numel, flat = flat_N.dtype, 0, []
    for part in parts:
        if part.dtype is not dtype or not part.is_contiguous():
            return False
        numel += part.numel()
        flat.append(part if part.dim() == 1 else part.view(-1))
    torch.cat(flat, out=flat_N if numel == flat_N.numel() else flat_N[:numel])
    return True


def is_aliased(tensor: Tensor) -> bool:
    """Whether another tensor shares the storage. (Two uses are known: ``tensor`` and this look-up.)"""
    return uses(tensor.untyped_storage()._cdata) > 2


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Whether both tensors have the same storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def real_view(flat: Tensor) -> Tensor:
    """The same memory as real numbers: of a complex tensor ``[N]`` a real one ``[2 N]``.

    For what treats real and imaginary parts alike, such as sums of ranks: backends may not know complex
    dtypes, and a product with a complex scalar may change the sign of a zero.
    """
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
