"""Sums over tensor ranks at the borders of cut layers, as autograd functions.

The sum of an activation in forward has no sum in backward, and the other way round. The functions work on
plain tensors: an operation on DTensors costs several times the host's time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.comm.layer_calls import recorded


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
