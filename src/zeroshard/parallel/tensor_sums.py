"""Sums over tensor ranks as autograd functions: at the borders of cut layers, and of cut logits.

The sum of an activation in forward has no sum in backward, and the other way round. The functions work on
plain tensors: an operation on DTensors costs several times the host's time. Letters: ``N`` tokens, ``V``
the vocabulary, ``v`` this tensor rank's part of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.layer_calls import recorded
from zeroshard.errors import UsageError
from zeroshard.parallel.tensor_styles import part


def add_gradients(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """``x``, which is equal on all ranks of the group. In backward, the ranks' gradients are added."""
    total: Tensor = _AddGradients.apply(x, group)
    return total


def add_values(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of ``x`` over the group, on all of its ranks. In backward, the gradient is passed on."""
    total: Tensor = _AddValues.apply(x, group)
    return total


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _sum(grad, ctx.group, "gradients of a layer's input"), None


class _AddValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        return _sum(x, group, "outputs of a layer")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        del ctx
        return grad, None


def _sum(values: Tensor, group: dist.ProcessGroup, name: str) -> Tensor:
    total = values.clone(memory_format=torch.contiguous_format)  # others may read ``values``
    all_reduce(total, group, name)
    return total


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, name: str, op: Any = None) -> None:
    """``dist.all_reduce`` of a layer, recorded if an engine watches the group. ``op``: None is the sum.

    Raises:
        DistributedError: a connection broke; the diagnosis of all ranks.
    """
    op = dist.ReduceOp.SUM if op is None else op
    if torch.compiler.is_compiling():
        dist.all_reduce(tensor, op=op, group=group)
        return
    with recorded(group, name, tensor):
        dist.all_reduce(tensor, op=op, group=group)


REDUCTIONS = ("mean", "sum", "none")


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    mesh: DeviceMesh,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The loss that ``F.cross_entropy`` computes of the whole logits. Equal on all tensor ranks.

    Collective: two all-reduces, of N and of 3N elements. ``logits``: ``[..., v]``, what a head with the
    style ``colwise`` gives; ``target``: ``[...]``, indices below ``vocab_size``, equal on all tensor
    ranks. ``mesh``: of the tensor ranks, one-dimensional. The result has the dtype of the logits; sums
    are in fp32 at least.

    Raises:
        UsageError: sizes do not fit, or on the CPU a target outside of the vocabulary. On accelerators
            such a target makes the loss NaN, since a check would wait for the device.
    """
    size, rank = mesh.size(), mesh.get_local_rank()
    begin, end = part(vocab_size, size, rank)
    if logits.shape[-1] != end - begin or logits.shape[:-1] != target.shape:
        raise UsageError(
            f"vocab_parallel_cross_entropy: logits have the shape {tuple(logits.shape)} and target "
            f"{tuple(target.shape)}. Tensor rank {rank} of {size} needs logits of the shape "
            f"{(*target.shape, end - begin)}, its part of a vocabulary of {vocab_size}. Use the style "
            '"colwise" for the head, which gives each rank its own part.'
        )
    if reduction not in REDUCTIONS or not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(
            f"vocab_parallel_cross_entropy: reduction = {reduction!r}, label_smoothing = "
            f"{label_smoothing}. reduction must be one of {', '.join(REDUCTIONS)}, and "
            "label_smoothing from 0 to 1."
        )
    target_N = target.reshape(-1)
    valid_N = target_N != ignore_index
    _check_targets(target_N, valid_N, vocab_size)
    losses_N: Tensor = _VocabParallelCrossEntropy.apply(
        logits.reshape(target.numel(), end - begin),
        torch.where(valid_N, target_N, 0),
        valid_N,
        (begin, vocab_size),
        label_smoothing,
        mesh.get_group(),
    )
    if reduction == "none":
        return losses_N.to(logits.dtype).view(target.shape)
    total = losses_N.sum()
    return (total / valid_N.sum() if reduction == "mean" else total).to(logits.dtype)


def _check_targets(target_N: Tensor, valid_N: Tensor, vocab_size: int) -> None:
    if target_N.device.type != "cpu":
        return
    wrong = valid_N & ((target_N < 0) | (target_N >= vocab_size))
    if wrong.any():
        raise UsageError(
            f"vocab_parallel_cross_entropy: the target {int(target_N[wrong][0])} is outside of the "
            f"vocabulary of {vocab_size}. Correct the labels, or mark them with ignore_index."
        )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Losses ``[N]`` of logits ``[N, v]``. Keeps the probabilities of this rank's part for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        target_N: Tensor,
        valid_N: Tensor,
        place: tuple[int, int],
        smoothing: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        begin, vocab_size = place
        wide = torch.promote_types(logits_Nv.dtype, torch.float32)
        n, v = logits_Nv.shape
        top_N = logits_Nv.new_full((n,), float("-inf"), dtype=wide)
        if v:
            top_N = logits_Nv.amax(dim=1).to(wide)
        all_reduce(top_N, group, "largest logits", dist.ReduceOp.MAX)
        shifted_Nv = logits_Nv.to(wide) - top_N[:, None]
        own_N = (target_N >= begin) & (target_N < begin + v)
        index_N = torch.where(own_N, target_N - begin, 0)
        sums = torch.zeros(3, n, dtype=wide, device=logits_Nv.device)
        if v:
            sums[0] = torch.where(own_N, shifted_Nv.gather(1, index_N[:, None])[:, 0], 0)
            if smoothing:  # else masked logits of minus infinity would give NaN
                sums[1] = shifted_Nv.sum(dim=1) * (smoothing / vocab_size)
        probs_Nv = shifted_Nv.exp_()
        sums[2] = probs_Nv.sum(dim=1)
        all_reduce(sums, group, "sums of the cross entropy")
        picked_N, smooth_N, norm_N = sums
        probs_Nv /= norm_N[:, None]
        loss_N = norm_N.log() - (1.0 - smoothing) * picked_N - smooth_N
        inside_N = (target_N >= 0) & (target_N < vocab_size)
        loss_N = torch.where(inside_N, loss_N, float("nan"))
        ctx.save_for_backward(probs_Nv, index_N, own_N, valid_N)
        ctx.smoothing, ctx.vocab_size, ctx.dtype = smoothing, vocab_size, logits_Nv.dtype
        return torch.where(valid_N, loss_N, 0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        probs_Nv, index_N, own_N, valid_N = ctx.saved_tensors
        grad_Nv = probs_Nv - ctx.smoothing / ctx.vocab_size
        if grad_Nv.shape[1]:
            hit = own_N.to(grad_Nv.dtype) * (1.0 - ctx.smoothing)
            grad_Nv.scatter_add_(1, index_N[:, None], -hit[:, None])
        grad_Nv *= torch.where(valid_N, grad_N, 0)[:, None]
        return grad_Nv.to(ctx.dtype), None, None, None, None, None
