"""How large is the gradient over all ranks, and which one number scales it?

Each element counts once: a rank measures the shards it owns, fragment by fragment like
``torch.nn.utils.clip_grad_norm_`` measures parameters, and one small exchange adds the ranks up in rank
order. Everything stays in 0-dim tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

CHUNK_NUMEL = 2**18
"""16-bit gradients are measured in upcast pieces of this many elements: they stay in cache."""


def norm_of(flat: Tensor) -> Tensor:
    """2-norm of a flat tensor as a 0-dim tensor, in fp32 (fp64 for fp64).

    16-bit values are upcast first: a 16-bit reduction is slow and inexact on CPU.
    """
    if flat.device.type != "cpu" and flat.dtype != torch.float64:
        measured: Tensor = torch.linalg.vector_norm(flat, dtype=torch.float32)  # one kernel
        return measured
    if flat.dtype in (torch.float32, torch.float64):
        wide = flat
    elif flat.numel() <= CHUNK_NUMEL:
        wide = flat.float()
    else:
        room = flat.new_empty(CHUNK_NUMEL, dtype=torch.float32)  # one for all: it stays in cache
        wide = torch.stack(
            [
                torch.linalg.vector_norm(room[: chunk.numel()].copy_(chunk))
                for chunk in flat.split(CHUNK_NUMEL)
            ]
        )
    norm: Tensor = torch.linalg.vector_norm(wide)
    return norm


def local_sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Square of the norm of norms, 0-dim fp64.

    The norm of norms is taken in the gradients' own precision, as PyTorch does; its square in fp64 is
    exact enough that one rank gets PyTorch's very bits back from the square root.
    """
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    local: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return local.double().square()


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """``max_norm / (norm + 1e-6)``, at most 1 (DeepSpeed key ``gradient_clipping``; 0 is off)."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
