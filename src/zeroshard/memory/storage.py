"""How is a flat storage filled and freed in place?

[Note: why storages are resized] Autograd saves *views* of parameters (``F.linear`` saves
``weight.t()``), not the parameters. If a parameter were given another tensor between forward and
backward, those views would silently keep the old values. So every unit owns one storage for ever;
parameters are views of it, and freeing or allocating it changes its size, never its identity.
"""

from __future__ import annotations

import torch
from torch import Tensor


def flat_nbytes(flat: Tensor) -> int:
    """Bytes that the flat tensor needs when its storage is allocated."""
    return flat.numel() * flat.element_size()


def allocate(flat: Tensor) -> None:
    """Give the storage of ``flat`` its bytes back; the contents are undefined."""
    storage = flat.untyped_storage()
    if storage.size() == 0:
        storage.resize_(flat_nbytes(flat))


def release(flat: Tensor) -> None:
    """Free the bytes behind ``flat`` and all of its views; reading them afterwards is forbidden."""
    flat.untyped_storage().resize_(0)


_PIECE_WORDS = {"cpu": 2**16}
"""Of a fingerprint: what the cache of a core holds; on other devices, what a kernel is worth."""


def fingerprint(flat: Tensor) -> Tensor:
    """A 0-dim int64 that changes if any one word of ``flat`` does, or if words change places.

    Costs a pass over the memory, never a wait for the device. ``flat`` holds a multiple of 8 bytes.
    """
    words = flat.view(torch.int64)
    piece_words = _PIECE_WORDS.get(flat.device.type, 2**20)
    weights = torch.arange(1, 2 * min(len(words), piece_words), 2, device=flat.device)
    weights = weights * 0x1E3779B97F4A7C15 | 1  # odd: a change of one word is never lost
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for piece in words.split(piece_words):
        total = 3 * total + (piece * weights[: len(piece)]).sum()
    return total


def is_aliased(tensor: Tensor) -> bool:
    """Does another tensor share the storage? (The two known users: ``tensor``, and this look at it.)"""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users > 2


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Do both tensors live in one storage?"""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
