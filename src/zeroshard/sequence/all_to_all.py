"""The all-to-all of sequence parallelism: a dimension is cut over the ranks, and another one joined.

``P``: ranks of the sequence group. In names of tensors: ``B`` samples, ``H`` heads, ``K`` key/value
heads, ``T`` tokens of the sequence, ``t`` = T / P tokens of a rank, ``D`` elements of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.layer_calls import recorded
from zeroshard.errors import UsageError


def all_to_all(x: Tensor, group: dist.ProcessGroup, *, cut: int, join: int) -> Tensor:
    """Cut ``x`` along ``cut`` into one piece for each rank, and join the pieces of all along ``join``.

    Dimension ``cut`` shrinks to 1/P, dimension ``join`` grows to P times its size; the other sizes and
    the dtype stay. Rank ``p`` gets piece ``p`` of every rank, in the order of ranks. All ranks pass equal
    shapes. Differentiable, any number of times: the backward is the exchange in the other direction.
    Sends (P - 1) / P of ``x``.
    """
    done: Tensor = _Exchange.apply(x, group, cut, join)
    return done


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.group, ctx.cut, ctx.join = group, cut, join
        # The pieces of all ranks lie one after another, so each is one message.
        pieces = x.unflatten(cut, (group.size(), -1)).movedim(cut, 0).contiguous()
        got = torch.empty_like(pieces)
        with recorded(
            group, "tokens and heads", pieces, op="all_to_all", sent=_sent(pieces, group)
        ):
            # As bytes: the transports of the CPU do not know every dtype.
            dist.all_to_all_single(as_bytes(got), as_bytes(pieces), group=group)
        return got.movedim(0, join).flatten(join, join + 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.group, cut=ctx.join, join=ctx.cut), None, None, None


def _sent(moved: Tensor, group: dist.ProcessGroup) -> int:
    """Elements that this rank sends of what all ranks have."""
    return moved.numel() * (group.size() - 1) // group.size()


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a view of its bytes, 1-dim."""
    return tensor.reshape(-1).view(torch.uint8)


def tokens_to_heads(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Tensors ``[B, heads, t, D]`` -> ``[B, heads / P, T, D]``. Those of equal ``D`` share one message.

    The numbers of heads may differ, and are divisible by P.
    """
    size = group.size()
    if len({tensor.shape[-1] for tensor in tensors}) > 1:
        return [all_to_all(tensor, group, cut=1, join=2) for tensor in tensors]
    pieces = [tensor.unflatten(1, (size, -1)) for tensor in tensors]
    whole = all_to_all(torch.cat(pieces, 2).flatten(1, 2), group, cut=1, join=2)
    return list(whole.split([piece.shape[2] for piece in pieces], 1))


def heads_to_tokens(x_BTHD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``[B, T, heads / P, D]`` -> ``[B, t, heads, D]``: the inverse, for the result of attention."""
    return all_to_all(x_BTHD, group, cut=1, join=2).contiguous()


def check_heads(heads: int, kv_heads: int, size: int) -> int:
    """How often key/value heads are copied, so that ``size`` ranks can divide them.

    Raises:
        UsageError: heads do not divide by ``size``, or key/value heads neither divide by it nor divide
        it.

    >>> check_heads(8, 8, 4), check_heads(8, 2, 4)
    (1, 2)
    """
    if heads % size:
        raise UsageError(
            f"attention has {heads} heads, which {size} sequence ranks cannot divide: each of them "
            "computes all tokens of some heads. Use a number of sequence ranks that divides the heads."
        )
    if kv_heads % size and size % kv_heads:
        raise UsageError(
            f"attention has {kv_heads} key/value heads and {size} sequence ranks: one number must divide "
            "the other, so that each rank has the key/value heads of its query heads. Use another number "
            "of sequence ranks."
        )
    return max(1, size // kv_heads)


def gathered(row: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    """The ``row`` of every rank, ``[P, *row.shape]``, in the order of ranks. All shapes are equal."""
    rows = row.new_empty((group.size(), *row.shape))
    with recorded(group, name, rows, op="all_gather", sent=_sent(rows, group)):
        dist.all_gather([as_bytes(own) for own in rows], as_bytes(row.contiguous()), group=group)
    return rows


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
