"""The styles of tensor parallelism: how one layer is cut, and what enters and leaves it.

A style is a ``ParallelStyle`` of torch, applied by ``parallelize_module``. ZeroShard has its own
because torch's lose ``requires_grad`` of norms and attributes of parameters, break ties, take widths and
sequences that do not divide for equal parts, and do not notice that a layer got the wrong input.

Between layers, activations are plain tensors in one of three forms: *whole* (equal on all tensor ranks),
*cut over features* (between a ``colwise`` and a ``rowwise`` layer), and *cut over the sequence* (the
residual stream of a plan with ``sequence`` norms). Such a norm gives the whole sequence as a ``DTensor``,
so that backward needs one reduce-scatter for all layers that read it. Parameters are DTensors; layers
compute with their local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

SEQUENCE_DIM = 1
"""Activations are ``[batch, sequence, features]``."""


@dataclass(frozen=True)
class StyleRow:
    """One style: ``kinds`` of layers it fits, and the axis on which weight and bias are cut.

    ``None``: every tensor rank has the whole parameter.
    """

    name: str
    kinds: tuple[str, ...]
    weight_axis: int | None
    bias_axis: int | None
    meaning: str

    def axis(self, leaf: str) -> int | None:
        """The axis on which the parameter ``leaf`` of a layer is cut."""
        return self.bias_axis if leaf == "bias" else self.weight_axis


MATRICES = ("Linear", "Conv1D")

STYLES: Mapping[str, StyleRow] = {
    row.name: row
    for row in (
        StyleRow("colwise", MATRICES, 0, 0, "rows of the weight; the output is cut over features"),
        StyleRow("colwise_by_head", MATRICES, 0, 0,
                 "colwise, for a fused projection whose rows are ordered head by head"),
        StyleRow("colwise_fused", MATRICES, 0, 0,
                 "colwise, for several matrices in one weight: rows of each of them"),
        StyleRow("colwise_gather", MATRICES, 0, 0, "colwise, and the output is gathered"),
        StyleRow("rowwise", MATRICES, 1, None, "columns of the weight; the outputs are added"),
        StyleRow("rowwise_split", MATRICES, 1, None, "rowwise, for an input that is whole"),
        StyleRow("vocab", ("Embedding",), 0, None, "rows of the vocabulary; the outputs are added"),
        StyleRow("head_bias", ("Embedding",), 1, None,
                 "columns of the table: a position bias with one column for each head"),
        StyleRow("head_norm", ("norm",), None, None,
                 "a norm over each head, between colwise and rowwise; gradients are added"),
        StyleRow("sequence", ("norm",), None, None,
                 "the input is cut over the sequence, the output is the whole sequence"),
        StyleRow("replicate", ("Linear", "Embedding", "norm"), None, None,
                 "every tensor rank has the whole parameter; it reads and gives the residual stream"),
    )
}  # fmt: skip
"""The styles of a plan by name."""

NORMS = (nn.LayerNorm, nn.RMSNorm)


def generic(name: str) -> str:
    """The name with ``*`` for every part that is a number.

    >>> generic("layers.12.mlp.up")
    'layers.*.mlp.up'
    """
    return ".".join("*" if token.isdigit() else token for token in name.split("."))


def row_of(text: str, module: nn.Module) -> StyleRow:
    """The style that an entry of a plan names, without the sizes after a colon, with the axes of a layer.

    Conv1D stores its weight transposed.
    """
    row = STYLES[text.partition(":")[0]]
    if row.weight_axis is None or kind_of(module) != "Conv1D":
        return row
    return replace(row, weight_axis=1 - row.weight_axis)


def kind_of(module: nn.Module) -> str | None:
    """``Linear``, ``Conv1D``, ``Embedding`` or ``norm``; None for a module that no style fits.

    ``Conv1D`` is that of Transformers: a linear layer with the weight ``[in, out]``.
    """
    if isinstance(module, nn.Linear):
        return "Linear"
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return "Conv1D"
    if isinstance(module, nn.Embedding):
        return "Embedding"
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    return "norm" if isinstance(module, NORMS) or named else None


def features(module: nn.Module) -> tuple[int, int]:
    """``(in, out)``: numbers of features of a Linear or Conv1D, as a whole."""
    if kind_of(module) == "Conv1D":
        return int(module.nx), int(module.nf)  # type: ignore[arg-type]
    return int(module.in_features), int(module.out_features)  # type: ignore[arg-type]


def part(extent: int, parts: int, index: int) -> tuple[int, int]:
    """Begin and end of part ``index`` of ``extent`` elements, as ``torch.chunk`` cuts them.

    >>> [part(5, 4, r) for r in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-extent // parts)
    return min(extent, index * step), min(extent, (index + 1) * step)


def part_of(values: Tensor, axis: int, parts: int, index: int, sizes: Sequence[int] = ()) -> Tensor:
    """Part ``index`` of ``values`` along ``axis``. ``sizes``: of each of the fused matrices.

    >>> part_of(torch.arange(6), 0, 2, 1, (4, 2))
    tensor([2, 3, 5])
    """
    if sizes:
        blocks = values.split(list(sizes), axis)
        return torch.cat([part_of(block, axis, parts, index) for block in blocks], axis)
    begin, end = part(values.shape[axis], parts, index)
    return values.narrow(axis, begin, end - begin)


def local_part(
    values: Tensor, axis: int | None, mesh: DeviceMesh, sizes: Sequence[int] = ()
) -> Tensor:
    """A copy of the part of ``values`` that this tensor rank keeps, on the mesh's device.

    The first dimension of the mesh cuts. Ranks that differ in a second one hold the same part.
    """
    values = values.detach()
    if axis is not None:
        values = part_of(values, axis, mesh.size(0), mesh.get_local_rank(0), sizes)
    return values.to(mesh.device_type, copy=True, memory_format=torch.contiguous_format)


def as_dtensor(local: Tensor, shape: torch.Size, axis: int | None, mesh: DeviceMesh) -> DTensor:
    """``local`` as this rank's part of a contiguous tensor of ``shape``, cut on ``axis``."""
    placement: Placement = Replicate() if axis is None else Shard(axis)
    placements = [placement, *[Replicate()] * (mesh.ndim - 1)]
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def moved(tensor: DTensor, placement: Placement) -> DTensor:
    """The DTensor with another placement.

    If it has the placement already, it is returned as it is: a ``redistribute`` that moves nothing in
    forward would still force the gradient of each reader into this placement.
    """
    if tensor.placements == (placement,):
        return tensor
    return tensor.redistribute(placements=[placement])


def compute_locally(
    module: nn.Module,
    forward: Callable[[Tensor], Tensor],
    leaves: Collection[str],
    x: Tensor,
) -> Tensor:
    """The layer's forward with this rank's parts of the parameters ``leaves``, without the others."""
    own: dict[str, Any] = dict(module._parameters)
    local = {
        leaf: _local_of(param) if leaf in leaves and param is not None else None
        for leaf, param in own.items()
    }
    module._parameters.update(local)  # type: ignore[arg-type]
    try:
        return forward(x)
    finally:
        module._parameters.update(own)


def _local_of(param: DTensor) -> Tensor:
    """This rank's part. Gradients of ranks that hold the same part are addends of a sum over them."""
    if param.device_mesh.ndim == 1:
        return param.to_local()
    return param.to_local(grad_placements=[param.placements[0], Partial()])


def multiply(module: nn.Module, x: Tensor) -> Tensor:
    """The forward of a Conv1D with the parameters that it has now. Its own one needs all of them."""
    weight: Any = module._parameters["weight"]
    bias = module._parameters["bias"]
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return y.view(*x.shape[:-1], weight.shape[1])


def look_up(
    module: nn.Embedding, forward: Callable[[Tensor], Tensor], mesh: DeviceMesh, ids: Tensor
) -> Tensor:
    """The embedding's forward with this rank's rows: the addend of this rank.

    Through the DTensor weight, torch would give each rank a gradient of the whole table.
    """
    padding_idx = module.padding_idx
    begin, end = part(module.weight.shape[0], mesh.size(), mesh.get_local_rank())
    own = (ids >= begin) & (ids < end)
    inside = padding_idx is not None and begin <= padding_idx < end
    module.padding_idx = padding_idx - begin if padding_idx is not None and inside else None
    try:
        rows = compute_locally(module, forward, ("weight",), torch.where(own, ids - begin, 0))
    finally:
        module.padding_idx = padding_idx
    return rows.masked_fill(~own[..., None], 0)
