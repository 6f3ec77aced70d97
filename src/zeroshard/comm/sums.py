"""Sums of the parts that ranks have sent, in rank order.

S elements are summed; every rank adds the same parts in the same order, so all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

#: Elements summed at a time: blocks of all ranks together stay in the second-level cache.
_BLOCK_NUMEL = 1 << 16
_SHORT = frozenset({torch.float16, torch.bfloat16})


def sum_in_rank_order(parts: Sequence[Tensor], out_S: Tensor) -> None:
    """``out_S = parts[0] + parts[1] + ...``, rounded once; ``out_S`` may be one of the parts.

    Two 16-bit numbers need no fp32 buffer: ``add`` gives their fp32 sum, rounded once.
    """
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out_S)
        return
    # Mixed-dtype arithmetic is 15 times slower on CPU than a widening copy and an add.
    short = parts[0].dtype in _SHORT
    numel = out_S.numel()
    wide = sum_temporary(out_S)
    block = wide.shape[1]
    for begin in range(0, numel, block):
        end = min(begin + block, numel)
        total, term = wide[:, : end - begin]
        total.copy_(parts[0][begin:end])
        for part in parts[1:]:
            total.add_(term.copy_(part[begin:end]) if short else part[begin:end])
        out_S[begin:end].copy_(total)


def sum_temporary(out_S: Tensor) -> Tensor:
    """Two rows of fp32 in which more than two parts are added, a block of elements at a time."""
    dtype = torch.float32 if out_S.dtype in _SHORT else out_S.dtype
    return out_S.new_empty((2, min(out_S.numel(), _BLOCK_NUMEL)), dtype=dtype)
