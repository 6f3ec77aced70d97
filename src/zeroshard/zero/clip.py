"""Computes the norm of the gradient over all ranks, and the factor that clips it.

Each element counts once: a rank measures the shards that it owns, fragment by fragment, as
``torch.nn.utils.clip_grad_norm_`` measures parameters. One small all-gather exchanges the ranks' sums,
which are added in rank order. All values stay in 0-dim tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 2**18
"""16-bit gradients are measured in upcast pieces of this many elements, which stay in the CPU's cache."""


def norm_of(flat: Tensor) -> Tensor:
    """2-norm of a flat tensor as a 0-dim tensor, in fp32 (fp64 for fp64).

    16-bit values are upcast first, since a 16-bit reduction is slow and inexact on CPU.
    """
    if flat.device.type != "cpu" and flat.dtype != torch.float64:
        measured: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)  # one kernel
        return measured
    if flat.dtype in (torch.float32, torch.float64):
        wide = flat
    elif flat.numel() <= CHUNK_NUMEL:
        wide = flat.float()
    else:
        room = flat.new_empty(CHUNK_NUMEL, dtype=torch.float32)  # reused: it stays in cache
        wide = torch.stack(
            [
                torch.linalg.vector_norm(room[: chunk.numel()].copy_(chunk))
                for chunk in flat.split(CHUNK_NUMEL)
            ]
        )
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm


def local_sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """The square of the norm of ``norms``, 0-dim fp64.

    The norm of norms is computed in the gradients' precision, as in PyTorch. Its square in fp64 is exact
    enough that its square root on one rank has PyTorch's bits.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    local: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return local.double().square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / (norm + 1e-6)``, at most 1 (DeepSpeed key ``gradient_clipping``; 0: no clipping)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
