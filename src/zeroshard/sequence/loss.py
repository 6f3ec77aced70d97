"""The loss of a sequence whose tokens are on several ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.errors import UsageError
from zeroshard.sequence.all_to_all import gathered


def mean_over_tokens(loss: Tensor, count: Tensor | int, group: dist.ProcessGroup) -> Tensor:
    """The mean loss of all tokens of a sequence group, 0-dim, equal on its P ranks.

    ``loss``: the mean of this rank's tokens that count, 0-dim. ``count``: their number; 0 is possible,
    and ``loss`` may be NaN then. The gradient is P times that of this rank's part, so the mean over the
    ranks of a mesh, which the engine takes, is the gradient of the mean loss. Sends two numbers to each
    rank, and nothing in backward.

    Raises:
        UsageError: one of the two is not one number.
    """
    if loss.dim() or (isinstance(count, Tensor) and count.numel() != 1):
        shapes = f"{tuple(loss.shape)} and {tuple(getattr(count, 'shape', ()))}"
        raise UsageError(
            f"mean_over_tokens: loss and count have the shapes {shapes}. The loss must be the mean of "
            "this rank's tokens, and the count their number: one number each."
        )
    own = torch.as_tensor(count, dtype=torch.float64, device=loss.device).reshape(())
    part = torch.where(own > 0, loss, torch.zeros_like(loss))
    row = torch.stack([part.detach().double() * own, own])
    total, tokens = gathered(row, group, "loss and tokens").sum(0).unbind()
    tokens = tokens.clamp(min=1)
    share = part * (own * group.size() / tokens).to(loss.dtype)
    return share + ((total / tokens).to(loss.dtype) - share).detach()
