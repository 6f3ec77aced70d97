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


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A flat tensor of ``numel`` elements whose storage is not allocated yet."""
    flat = torch.empty(0, dtype=dtype, device=device)
    return flat.set_(flat.untyped_storage(), 0, (numel,), (1,)) if numel == 0 else _grown(flat, numel)


def _grown(flat: Tensor, numel: int) -> Tensor:
    flat = torch.empty(numel, dtype=flat.dtype, device=flat.device)
    release(flat)
    return flat
