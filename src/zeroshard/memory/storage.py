"""Allocates and releases the memory of a flat tensor in place.

[Note: why storages are resized] Autograd saves *views* of parameters (``F.linear`` saves ``weight.t()``),
not the parameters. If a parameter were given another tensor between forward and backward, these views
would keep the old values without an error. So every unit owns one storage as long as it lives. Parameters
are views of it. Releasing or allocating it changes its size and never its identity (ADR 0002).
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_nbytes(flat: Tensor) -> int:
    """Bytes of the flat tensor when its storage has memory."""
    return flat.numel() * flat.element_size()


def allocate(flat: Tensor) -> None:
    """Give the storage of ``flat`` memory again. The contents are undefined."""
    storage = flat.untyped_storage()
    if storage.size() == 0:
        storage.resize_(flat_nbytes(flat))


def release(flat: Tensor) -> None:
    """Free the memory of ``flat`` and all its views. They must not be read until :func:`allocate`."""
    flat.untyped_storage().resize_(0)


_PIECE_WORDS = {"cpu": 2**16}
"""Words per piece of a fingerprint: on CPU as many as a core's cache holds.

Other devices take 2**20, enough work for one kernel.
"""


def fingerprint(flat: Tensor) -> Tensor:
    """A 0-dim int64 that changes if one word of ``flat`` changes, or if words change places.

    Reads the memory once and does not wait for the device. ``flat`` has a multiple of 8 bytes.
    """
    words = flat.view(torch.int64)
    piece_words = _PIECE_WORDS.get(flat.device.type, 2**20)
    weights = torch.arange(1, 2 * min(len(words), piece_words), 2, device=flat.device)
    weights = weights * 0x1E3779B97F4A7C15 | 1  # odd: a change of one word always changes the sum
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in words.split(piece_words):
        total = 3 * total + (piece * weights[: len(piece)]).sum()
    return total


def is_aliased(tensor: Tensor) -> bool:
    """Whether another tensor shares the storage. (Two uses are known: ``tensor`` and this look-up.)"""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users > 2


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Whether both tensors have the same storage."""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
