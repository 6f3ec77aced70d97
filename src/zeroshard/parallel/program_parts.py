"""Layers that a program has cut over tensor ranks by itself, as Megatron's programs do.

Their parameters are plain: each tensor rank has tensors of its own, and the layers send by themselves.
Attributes of a parameter say what it is a part of. Those of Megatron: ``tensor_model_parallel`` (gpt-neox
and DeepSpeed: ``model_parallel``) is true for a part; ``partition_dim`` is the axis that is cut, and
``partition_stride`` how many matrices of equal size it joins there. ``sequence_parallel`` is true for a
parameter that every tensor rank holds, and whose gradient is a sum over them, because each rank's layer
sees a part of the tokens. A parameter without such a mark is the same on all tensor ranks. So are the
experts of a ``MoE`` layer without ``enable_expert_tensor_parallelism``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm.collectives import Comm
from zeroshard.comm.dtensors import JOIN, KINDS, add_over, is_part, runs_of
from zeroshard.core.layout import SlotBlock
from zeroshard.core.mesh import Mesh
from zeroshard.errors import UsageError


def part_block(name: str, param: Any, mesh: Mesh, rank: int) -> SlotBlock | None:
    """The place in the whole tensor of a part that a program has cut; None: it is no such part.

    Parts are equal, and lie along ``partition_dim`` in the order of the tensor ranks.

    Raises:
        UsageError: the marks do not say which axis is cut, or contradict the shape.
    """
    if mesh.tensor == 1 or not is_part(param):
        return None
    axis, stride = getattr(param, "partition_dim", None), getattr(param, "partition_stride", 1)
    shape = tuple(param.shape)
    if not isinstance(axis, int) or not 0 <= axis < len(shape):
        raise UsageError(
            f"parameter {name!r} of shape {shape} has the mark of a part that one of {mesh.tensor} "
            f"tensor ranks holds (model_parallel or tensor_model_parallel is true), but its "
            f"partition_dim is {axis!r}, so it is unknown along which axis the parts of the ranks lie. "
            "Set partition_dim to this axis, and partition_stride to the number of matrices of equal "
            "size that it joins there (1 without it)."
        )
    if not isinstance(stride, int) or stride < 1 or shape[axis] % stride:
        raise UsageError(
            f"parameter {name!r} of shape {shape} has partition_stride {stride!r}: it should be the "
            f"number of matrices that the parameter joins along axis {axis}, which divides "
            f"{shape[axis]}. Set it to 1 if it is one matrix."
        )
    place = mesh.coordinate(rank)["tensor"]
    whole = [*shape]
    whole[axis] *= mesh.tensor
    start = [0] * len(shape)
    start[axis] = place * shape[axis]
    runs: tuple[tuple[int, int], ...] = ()
    if stride > 1:
        runs = runs_of([whole[axis] // stride] * stride, mesh.tensor, place)
        start[axis] = runs[0][0]
    split = frozenset({"tensor"})
    return SlotBlock(tuple(whole), tuple(start), split, prod(shape), axis, runs)


def note_sums(params: Iterable[nn.Parameter], mesh: Mesh, rank: int) -> None:
    """Note the parameters that all tensor ranks hold and whose gradients are added over these."""
    for param in params if mesh.tensor > 1 else ():
        is_whole = type(param) not in KINDS and not is_part(param)
        if is_whole and getattr(param, "sequence_parallel", False):
            add_over(param, mesh.group(rank, {"tensor"}))


def connect_parts(params: Iterable[nn.Parameter], tensor: Comm | None) -> Callable[[], None]:
    """Let exports join the parts that a program has cut, until the function that is returned is called.

    ``tensor``: this rank's tensor group; None: all parameters are whole.
    """
    if tensor is None:
        return lambda: None
    parts: list[Any] = [param for param in params if is_part(param)]
    for part in parts:
        stride = getattr(part, "partition_stride", 1)
        setattr(part, JOIN, partial(_joined, axis=part.partition_dim, stride=stride, tensor=tensor))

    def disconnect() -> None:
        for part in parts:
            part.__dict__.pop(JOIN, None)

    return disconnect


def order_of_parts(params: Iterable[Tensor], saved: str, tensor: int) -> str:
    """What a run must know that loads parts of other tensor ranks than it has; "" if there is nothing.

    ``saved``: the mesh of the checkpoint, as text. ``tensor``: the tensor ranks of this run.
    """
    found = re.search(r"\btensor (\d+)", saved)
    before = int(found[1]) if found else 1
    if before == tensor or not any(map(is_part, params)):
        return ""
    return (
        f"was saved with tensor {before}, and this run has tensor {tensor}. Weights that the program "
        "cuts by itself are joined and cut in the order of the ranks, and of the matrices that "
        "partition_stride counts. If a layer joins several matrices without partition_stride, as "
        "gated MLPs of Megatron do, their rows are mixed up now: continue such a model with tensor "
        f"{before}."
    )


def _joined(local: Tensor, *, axis: int, stride: int, tensor: Comm) -> Tensor:
    """The whole tensor from the parts of all tensor ranks. Collective over them."""
    own = local.detach().contiguous().view(-1)
    all_N = own.new_empty(tensor.size * own.numel())
    tensor.all_gather(all_N, own, name="parts of tensor ranks").wait()
    parts = all_N.view(tensor.size, *local.shape).unbind()
    pieces = [part.chunk(stride, axis) for part in parts]
    return torch.cat([piece[at] for at in range(stride) for piece in pieces], axis)
