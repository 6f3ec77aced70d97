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


def is_aliased(tensor: Tensor) -> bool:
    """Does another tensor share the storage? (The two known users: ``tensor``, and this look at it.)"""
    users: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return users > 2


def is_shared(a: Tensor, b: Tensor) -> bool:
    """Do both tensors live in one storage?"""
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)
